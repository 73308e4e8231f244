//! What a drill asks the services themselves, on their admin listeners: of which profile they are, and to let dependencies
//! fail. Several services behind one gateway are all asked, since any of them may decide.

use portcullis_decision::config::Profile;
use serde_json::{Value, json};

use super::client::Place;
use super::probes::name_of;
use crate::explain::request::Request;
use crate::imagined::Outage;

/// For how long a fault is ordered, in seconds: it is ended after its probe, and ends by itself if the drill does not.
const FAULT_S: u64 = 20;

/// The admin listeners of all services.
pub(super) struct Switches {
    places: Vec<Place>,
    token: Option<String>,
}

/// What a service says of itself.
pub(super) struct Standing {
    /// Its profile.
    pub(super) profile: Profile,
    /// The fingerprint of its configuration.
    pub(super) config_hash: String,
}

impl Switches {
    /// Those at these places, with the token that they ask for.
    pub(super) const fn new(places: Vec<Place>, token: Option<String>) -> Self {
        Self { places, token }
    }

    /// Whether there are any.
    pub(super) const fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    async fn call(
        &self,
        place: &Place,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), String> {
        let mut headers = Vec::new();
        if let Some(token) = &self.token {
            headers.push(("authorization".to_owned(), format!("Bearer {token}")));
        }
        if body.is_some() {
            headers.push(("content-type".to_owned(), "application/json".to_owned()));
        }
        let request = Request {
            method: method.to_owned(),
            path: place.path(path),
            authority: None,
            headers,
            body: body.map(|body| body.to_string().into_bytes()).unwrap_or_default(),
        };
        let got = place.send(&request).await.map_err(|why| format!("--admin: {why}"))?;
        let body = serde_json::from_slice(&got.body).unwrap_or_default();
        Ok((got.status, body))
    }

    /// What each service says of itself.
    ///
    /// # Errors
    /// A service that does not answer so, by its place.
    pub(super) async fn standings(&self) -> Result<Vec<Standing>, String> {
        let mut standings = Vec::with_capacity(self.places.len());
        for place in &self.places {
            let at = place.authority();
            let (status, body) = self.call(place, "GET", "/admin/v1/state", None).await?;
            if status == 401 {
                return Err(format!("--admin {at}: asks for another token (--token-file)"));
            }
            let profile = text_at(&body, "/service/profile").and_then(Profile::named);
            let Some(profile) = profile.filter(|_| status == 200) else {
                return Err(format!(
                    "--admin {at}: is no admin listener of a service: status {status}"
                ));
            };
            let config_hash = text_at(&body, "/service/config_hash").unwrap_or_default().to_owned();
            standings.push(Standing { profile, config_hash });
        }
        Ok(standings)
    }

    /// Lets exactly these fail at every service; gives the milliseconds until that shows.
    ///
    /// # Errors
    /// A service that does not do so.
    pub(super) async fn let_fail(&self, outages: &[Outage]) -> Result<u64, String> {
        let names: Vec<&str> = outages.iter().map(|outage| name_of(*outage)).collect();
        let order = json!({"dependencies": names, "for_s": FAULT_S});
        let mut settles_in_ms = 0;
        for place in &self.places {
            let (status, body) = self.call(place, "POST", "/admin/v1/faults", Some(&order)).await?;
            if status != 200 {
                let at = place.authority();
                let why = text_at(&body, "/error").unwrap_or_default();
                return Err(format!("the fault switch of {at} answered {status}: {why}"));
            }
            settles_in_ms = settles_in_ms.max(body.get("settles_in_ms").and_then(Value::as_u64).unwrap_or_default());
        }
        Ok(settles_in_ms)
    }
}

fn text_at<'a>(body: &'a Value, pointer: &str) -> Option<&'a str> {
    body.pointer(pointer).and_then(Value::as_str)
}
