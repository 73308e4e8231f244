//! `--limit`: a contract limit that every request of a log is given, in place of the one that it had.

use std::str::FromStr;

use portcullis_decision::limits::{LARGEST_LIMIT, Resource, Scope};

use super::record::Record;

/// One limit, for one id or for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitChange {
    scope: Scope,
    /// `None`: for every id.
    id: Option<String>,
    resource: Resource,
    /// `None`: unlimited.
    figure: Option<u64>,
}

impl FromStr for LimitChange {
    type Err = String;

    /// `SCOPE:ID:RESOURCE=N`; the id `*` is every one, the figure `none` is no limit.
    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "must be SCOPE:ID:RESOURCE=N, such as org:*:requests=30; the figure \"none\" lifts a limit";
        let (what, figure) = text.rsplit_once('=').ok_or(FORM)?;
        let (scope, rest) = what.split_once(':').ok_or(FORM)?;
        let (id, resource) = rest.rsplit_once(':').ok_or(FORM)?;
        let scope = Scope::CONTRACT
            .into_iter()
            .find(|known| known.name() == scope)
            .ok_or_else(|| {
                format!("{scope:?} is no scope of a contract: there are owner, org and auth; tiers stand in --service, plans in --policy")
            })?;
        let resource = Resource::ALL
            .into_iter()
            .find(|known| known.name() == resource)
            .ok_or_else(|| format!("{resource:?} is not limited: there are requests, tokens and concurrency"))?;
        if id.is_empty() {
            return Err(FORM.to_owned());
        }
        let figure = match figure {
            "none" => None,
            figure => {
                let number = figure.parse().ok().filter(|number| *number <= LARGEST_LIMIT);
                Some(number.ok_or_else(|| format!("{figure:?} is neither \"none\" nor from 0 to {LARGEST_LIMIT}"))?)
            }
        };
        Ok(Self {
            scope,
            id: (id != "*").then(|| id.to_owned()),
            resource,
            figure,
        })
    }
}

impl LimitChange {
    /// Stamps the limit on a request that has the scope's id.
    pub fn apply(&self, record: &mut Record, prefix: &str) {
        let scope = self.scope.name();
        let of_id = format!("{prefix}{scope}-id");
        let Some(id) = record.headers.get(&of_id) else { return };
        if self.id.as_ref().is_some_and(|wanted| wanted != id) {
            return;
        }
        let name = match self.resource {
            Resource::Concurrency => format!("{prefix}{scope}-concurrency-limit"),
            resource => format!("{prefix}{scope}-rate-limit-{}", resource.name()),
        };
        record.headers.remove(&name);
        if let Some(figure) = self.figure {
            record.headers.push(&[&name], figure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_stamped_on_those_it_is_for() {
        let mut record = Record::default();
        record.headers.push(&["p-org-id"], "a:b");
        record.headers.push(&["p-org-rate-limit-requests"], 60);
        let mut after = |text: &str| {
            text.parse::<LimitChange>().unwrap().apply(&mut record, "p-");
            let (name, value) = record.headers.iter().last().unwrap();
            (name.to_owned(), value.to_owned())
        };
        let name = || "p-org-rate-limit-requests".to_owned();
        assert_eq!(after("org:x:requests=1"), (name(), "60".to_owned()));
        assert_eq!(after("owner:*:requests=1"), (name(), "60".to_owned()));
        assert_eq!(after("org:a:b:requests=1"), (name(), "1".to_owned()));
        assert_eq!(after("org:*:requests=30"), (name(), "30".to_owned()));
        assert_eq!(after("org:*:concurrency=2").0, "p-org-concurrency-limit");
        after("org:*:concurrency=none");
        assert_eq!(after("org:*:requests=none").0, "p-org-id");
        for (text, why) in [
            ("org:requests=1", "must be SCOPE:ID:RESOURCE=N"),
            ("platform:*:requests=1", "no scope of a contract"),
            ("org:*:cost=1", "is not limited"),
            ("org:*:requests=-1", "neither \"none\" nor"),
            ("org::requests=1", "must be SCOPE:ID:RESOURCE=N"),
        ] {
            assert!(text.parse::<LimitChange>().unwrap_err().contains(why), "{text}");
        }
    }
}
