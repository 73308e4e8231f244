//! `portcullis envelope`: signs the envelope of a request as an edge does, and judges one as the filter does.
//!
//! A secret comes out of a file, standard input or the environment, never out of an argument, which any user of the machine
//! could read in the list of processes; and it is never written anywhere.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, io};

use portcullis_decision::config::{FilterConfig, prefix_fault};
use portcullis_decision::envelope::{self, Reading};
use portcullis_decision::rules::GateRule;
use portcullis_decision::signature::{
    LONGEST_KEY_ID, NAME, Request, Secret, Signatures, Standing, Twice, is_key_id, is_signature, message, sign,
};

use crate::check::FAULTY;
use crate::cli::{EnvelopeCommand, KeyArguments, RequestArguments, SignArguments, VerifyArguments};
use crate::unix_s;

/// The environment variable that may hold a secret.
const SECRET_VARIABLE: &str = "PORTCULLIS_ENVELOPE_SECRET";
/// Exit code for an envelope that is not trusted, or not well-formed.
const REFUSED: u8 = 1;

/// What is wrong with the arguments, in a sentence.
type Fault = String;

/// Runs the subcommand.
pub fn run(command: &EnvelopeCommand) -> ExitCode {
    let outcome = match command {
        EnvelopeCommand::Sign(arguments) => signed(arguments).map(|line| (line, ExitCode::SUCCESS)),
        EnvelopeCommand::Verify(arguments) => verified(arguments).map(|judgement| match judgement {
            Ok(line) => (line, ExitCode::SUCCESS),
            Err(line) => (line, ExitCode::from(REFUSED)),
        }),
    };
    match outcome {
        Ok((line, code)) => {
            // A reader that has closed the pipe has seen enough; the exit code still tells.
            drop(writeln!(io::stdout().lock(), "{line}"));
            code
        }
        Err(fault) => {
            drop(writeln!(io::stderr().lock(), "{fault}"));
            ExitCode::from(FAULTY)
        }
    }
}

/// The headers of the command line, and what they are headers of.
struct Asked<'a> {
    arguments: &'a RequestArguments,
    headers: Vec<(&'a [u8], &'a [u8])>,
}

impl<'a> Asked<'a> {
    fn of(arguments: &'a RequestArguments) -> Result<Self, Fault> {
        let headers = arguments
            .headers
            .iter()
            .map(|line| header(line))
            .collect::<Result<_, _>>()?;
        if !arguments.path.starts_with('/') {
            return Err(format!("--path: must start with \"/\", is {:?}", arguments.path));
        }
        if let Some(fault) = prefix_fault(&arguments.prefix) {
            return Err(format!("--prefix: {fault}"));
        }
        Ok(Self { arguments, headers })
    }

    fn request(&self) -> Request<'_> {
        Request {
            method: self.arguments.method.as_bytes(),
            path: self.arguments.path.as_bytes(),
            headers: &self.headers,
        }
    }
}

/// A line `name: value`, without the white space that HTTP does not count as part of a value.
fn header(line: &str) -> Result<(&[u8], &[u8]), Fault> {
    let (name, value) = line.split_once(':').unwrap_or_default();
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err(format!("--header: must be \"name: value\", is {line:?}"));
    }
    Ok((name.as_bytes(), value.trim_matches([' ', '\t']).as_bytes()))
}

fn signed(arguments: &SignArguments) -> Result<String, Fault> {
    let asked = Asked::of(&arguments.request)?;
    let (prefix, (id, secret)) = (&arguments.request.prefix, key(&arguments.key)?);
    let at_s = match arguments.at {
        Some(at_s) => at_s,
        None => unix_s().ok_or("the clock of this machine stands before 1970: give --at")?,
    };
    let twice = |Twice(name)| format!("{name} stands twice: what would be refused is not signed");
    if arguments.message {
        let message = message(prefix, asked.request(), id, at_s).map_err(twice)?;
        return Ok(String::from_utf8_lossy(&message).into_owned());
    }
    let value = sign(prefix, asked.request(), id, &secret, at_s).map_err(twice)?;
    Ok(format!("{prefix}{NAME}: {value}"))
}

/// What is accepted, and how the envelope is read.
struct Terms {
    prefix: String,
    signatures: Signatures,
    needs_org: bool,
}

impl Terms {
    fn of(arguments: &VerifyArguments) -> Result<Self, Fault> {
        let Some(file) = &arguments.config else {
            let (id, secret) = key(&arguments.key)?;
            return Ok(Self {
                prefix: arguments.request.prefix.clone(),
                signatures: Signatures::new(vec![(id.to_owned(), secret)], arguments.max_age_s),
                needs_org: false,
            });
        };
        let name = file.display();
        let text = fs::read(file).map_err(|error| format!("{name}: cannot be read: {error}"))?;
        let config = FilterConfig::parse(&text).map_err(|faults| format!("{name}: {faults}"))?;
        let signatures = config
            .signatures
            .ok_or_else(|| format!("{name}: has no envelope.signature, so that every envelope is trusted"))?;
        Ok(Self {
            needs_org: config.rules.gates.iter().any(GateRule::needs_org),
            prefix: config.prefix,
            signatures,
        })
    }
}

/// `Ok` for what the filter would go on with, `Err` for what it would refuse.
fn verified(arguments: &VerifyArguments) -> Result<Result<String, String>, Fault> {
    let asked = Asked::of(&arguments.request)?;
    let terms = Terms::of(arguments)?;
    let now_s = arguments.at.or_else(unix_s);
    let (key, at_s) = match terms.signatures.check(&terms.prefix, asked.request(), || now_s) {
        Err(untrusted) => return Ok(Err(format!("ENVELOPE_UNTRUSTED: {untrusted}"))),
        Ok(Standing::Bare) => {
            let prefix = &terms.prefix;
            return Ok(Err(format!(
                "ENVELOPE_MISSING: no header under {prefix}: when_missing of the rules decides"
            )));
        }
        Ok(Standing::Signed { key, at_s }) => (key, at_s),
    };
    let fields = asked.headers.iter().copied();
    let fields = fields.filter(|(name, _)| !is_signature(name, &terms.prefix));
    Ok(match envelope::read(fields, &terms.prefix, terms.needs_org) {
        Reading::Malformed(why) => Err(format!("ENVELOPE_MALFORMED: well signed, and {why}")),
        Reading::Partial(why) => Err(format!("ENVELOPE_PARTIAL: well signed, and {why}")),
        Reading::Missing => {
            Err("ENVELOPE_MISSING: well signed, and no owner id or limit: when_missing of the rules decides".to_owned())
        }
        Reading::Present(_) => {
            let when = match now_s.map(|now_s| (now_s.checked_sub(at_s), at_s.saturating_sub(now_s))) {
                Some((Some(age_s), _)) => format!("{age_s} s ago"),
                Some((None, ahead_s)) => format!("{ahead_s} s ahead of this clock"),
                None => format!("at {at_s}"),
            };
            Ok(format!("valid: signed by {key}, {when}"))
        }
    })
}

/// The key that the arguments and the environment name.
pub(crate) fn key(arguments: &KeyArguments) -> Result<(&str, Secret), Fault> {
    let id = arguments.key_id.as_deref().ok_or("--key-id ID is needed")?;
    if !is_key_id(id) {
        return Err(format!(
            "--key-id: must be 1 to {LONGEST_KEY_ID} letters, digits, \".\", \"_\" or \"-\"; it is not shown"
        ));
    }
    let (from, text) = match &arguments.secret_file {
        Some(file) if file == Path::new("-") => ("standard input".to_owned(), read_all(&mut io::stdin().lock())?),
        Some(file) => {
            let name = file.display();
            let text = fs::read_to_string(file).map_err(|error| format!("{name}: cannot be read: {error}"))?;
            (name.to_string(), text)
        }
        None => {
            let text = env::var(SECRET_VARIABLE).map_err(|_| {
                format!("no secret: give --secret-file FILE (- for standard input) or {SECRET_VARIABLE}")
            })?;
            (SECRET_VARIABLE.to_owned(), text)
        }
    };
    let secret = Secret::from_base64(text.trim()).map_err(|fault| format!("{from}: {fault}"))?;
    Ok((id, secret))
}

fn read_all(from: &mut impl io::Read) -> Result<String, Fault> {
    let mut text = String::new();
    from.take(64 * 1024)
        .read_to_string(&mut text)
        .map_err(|error| format!("standard input: cannot be read: {error}"))?;
    Ok(text)
}
