//! The scripts, their arguments, and what their answers mean. The algorithm stands in the `.lua` files.

use std::sync::LazyLock;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, ChargePlan, Charged, EntryState};
use portcullis_decision::ledger::LARGEST_COUNT;
use portcullis_decision::limits::Resource;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use redis::{RedisWrite, ToRedisArgs, Value};

/// How long an operation is remembered beyond what it took: longer than any retry or late cancel.
const GRACE: Duration = Duration::from_secs(60);

/// A script with the name under which the server keeps it.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) source: &'static str,
    pub(super) sha: String,
}

fn script(source: &'static str) -> Script {
    Script {
        source,
        sha: redis::Script::new(source).get_hash().to_owned(),
    }
}

static CHARGE: LazyLock<Script> = LazyLock::new(|| script(include_str!("../charge.lua")));
static CANCEL: LazyLock<Script> = LazyLock::new(|| script(include_str!("../cancel.lua")));
static SETTLE: LazyLock<Script> = LazyLock::new(|| script(include_str!("../settle.lua")));
static PART: LazyLock<Script> = LazyLock::new(|| script(include_str!("../part.lua")));
static RENEW: LazyLock<Script> = LazyLock::new(|| script(include_str!("../renew.lua")));
static DIRECTORY: LazyLock<Script> = LazyLock::new(|| script(include_str!("../directory.lua")));
static PROBE: LazyLock<Script> = LazyLock::new(|| script(include_str!("../probe.lua")));

/// Where what an operation took is remembered: on one server for all that it took, in a cluster for each group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) prefix: &'a str,
    pub(super) op: OperationId,
    /// The group, and under which label the operation took something there.
    pub(super) group: Option<(&'a str, &'a str)>,
    /// The keys of what it took. In a cluster a script has to be told them; on one server it knows them by itself.
    pub(super) counters: &'a [String],
}

impl<'a> Place<'a> {
    /// The only one on a single server.
    pub(super) const fn single(prefix: &'a str, op: OperationId) -> Self {
        Self {
            prefix,
            op,
            group: None,
            counters: &[],
        }
    }

    fn record(&self) -> String {
        match self.group {
            None => [self.prefix, ":op:", &self.op.to_string()].concat(),
            Some((tag, label)) => [self.prefix, ":", tag, ":op:", &self.op.to_string(), label].concat(),
        }
    }

    /// Under which name it holds slots.
    fn holder(&self) -> Argument {
        let mut holder = self.op.to_string();
        holder.push_str(self.group.map_or("", |(_, label)| label));
        Argument::Text(holder)
    }

    fn keys(&self) -> Vec<String> {
        std::iter::once(self.record())
            .chain(self.counters.iter().cloned())
            .collect()
    }
}

/// The key of an entry.
pub(super) fn counter(prefix: &str, entry: &ChargeEntry) -> String {
    [prefix, ":", &entry.key].concat()
}

/// What is asked of a directory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verb<'a> {
    /// What it says. It lives for at least so long.
    Find { kept_for: Duration },
    /// Opens an attempt at a charge of these keys, or joins the one that is there.
    Claim {
        kept_for: Duration,
        size: u64,
        keys: &'a [String],
    },
    /// The attempt has charged every group.
    Commit { attempt: u64 },
    /// The attempt was denied: what it charged goes back.
    Retire { attempt: u64 },
    /// The operation takes nothing more.
    Cancel,
}

/// How long an operation is remembered whose slots or windows live for `duration`.
pub(super) const fn after_grace(duration: Duration) -> Duration {
    duration.saturating_add(GRACE)
}

/// What a script is told beside its keys. A figure is written where it is sent, and not before: a charge has a dozen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Argument {
    Word(&'static str),
    Text(String),
    Figure(u64),
    /// What may be negative.
    Signed(i64),
}

impl ToRedisArgs for Argument {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        match self {
            Self::Word(word) => word.write_redis_args(out),
            Self::Text(text) => text.write_redis_args(out),
            Self::Figure(figure) => figure.write_redis_args(out),
            Self::Signed(figure) => figure.write_redis_args(out),
        }
    }
}

impl Argument {
    /// Whether this is what a script has sent back.
    fn is_echoed_by(&self, echo: &str) -> bool {
        match self {
            Self::Word(word) => *word == echo,
            Self::Text(text) => text == echo,
            // Nothing that tells two calls apart.
            Self::Figure(_) | Self::Signed(_) => false,
        }
    }
}

/// One run of a script. The first argument comes back as the first word of the answer.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) script: &'static Script,
    pub(super) keys: Vec<String>,
    pub(super) arguments: Vec<Argument>,
}

impl Call {
    pub(super) fn charge(at: &Place<'_>, plan: &ChargePlan, slot_ttl: Duration) -> Self {
        let block = plan.asked_block().map(|block| {
            [
                block.most.min(LARGEST_COUNT),
                block.parts.clamp(1, LARGEST_COUNT),
                u64::from(block.ahead),
            ]
        });
        Self::charge_of(at, plan, slot_ttl, block.into_iter().flatten())
    }

    /// A charge of exactly so many admissions, or none, where the block that was asked for is of that size.
    pub(super) fn charge_exactly(at: &Place<'_>, plan: &ChargePlan, slot_ttl: Duration) -> Self {
        let mut call = Self::charge(at, plan, slot_ttl);
        if plan.asked_block().is_some() {
            call.arguments.push(Argument::Word("exact"));
        }
        call
    }

    /// Asks where the entries of a plan stand and charges nothing: a block of nothing, which no request waits for.
    pub(super) fn look(at: &Place<'_>, plan: &ChargePlan, slot_ttl: Duration) -> Self {
        Self::charge_of(at, plan, slot_ttl, [0, 1, 1])
    }

    fn charge_of(at: &Place<'_>, plan: &ChargePlan, slot_ttl: Duration, block: impl IntoIterator<Item = u64>) -> Self {
        let entries = plan.entries.len();
        let mut keys = Vec::with_capacity(entries.saturating_add(1));
        keys.push(at.record());
        let mut arguments = Vec::with_capacity(entries.saturating_mul(4).saturating_add(7));
        arguments.extend([at.holder(), ms(slot_ttl), ms(GRACE)]);
        for entry in &plan.entries {
            keys.push(counter(at.prefix, entry));
            let kind = match entry.resource {
                Resource::Concurrency => "s",
                Resource::Tokens => "t",
                Resource::Requests => "w",
            };
            arguments.extend([
                Argument::Word(kind),
                Argument::Figure(entry.limit),
                // A larger cost is as far over every limit.
                Argument::Figure(entry.cost.min(LARGEST_COUNT)),
                ms(Duration::from_secs(entry.window_s)),
            ]);
        }
        arguments.extend(block.into_iter().map(Argument::Figure));
        Self {
            script: &CHARGE,
            keys,
            arguments,
        }
    }

    pub(super) fn cancel(at: &Place<'_>) -> Self {
        Self {
            script: &CANCEL,
            keys: at.keys(),
            arguments: vec![at.holder(), ms(GRACE)],
        }
    }

    pub(super) fn settle(at: &Place<'_>, tokens: Option<u64>) -> Self {
        let tokens = tokens.map(|tokens| Argument::Figure(tokens.min(LARGEST_COUNT)));
        Self {
            script: &SETTLE,
            keys: at.keys(),
            arguments: std::iter::once(at.holder()).chain(tokens).collect(),
        }
    }

    /// Of the block that was charged there. The return's own id is remembered beside it.
    pub(super) fn part(at: &Place<'_>, of: Return) -> Self {
        let most = i64::try_from(LARGEST_COUNT).unwrap_or(i64::MAX);
        let mut keys = at.keys();
        keys.insert(1, Place { op: of.id, ..*at }.record());
        Self {
            script: &PART,
            keys,
            arguments: vec![
                Argument::Text(of.id.to_string()),
                Argument::Figure(of.requests.min(LARGEST_COUNT)),
                Argument::Signed(of.tokens.clamp(most.saturating_neg(), most)),
                ms(GRACE),
            ],
        }
    }

    pub(super) fn renew(at: &Place<'_>, slot_ttl: Duration) -> Self {
        Self {
            script: &RENEW,
            keys: at.keys(),
            arguments: vec![at.holder(), ms(slot_ttl), ms(GRACE)],
        }
    }

    /// Asks the directory of an operation, or changes it; see `directory.lua`.
    pub(super) fn directory(key: String, op: OperationId, verb: Verb<'_>) -> Self {
        let (name, ttl, figure, charged): (_, _, _, &[String]) = match verb {
            Verb::Find { kept_for } => ("find", kept_for, 0, &[]),
            Verb::Claim { kept_for, size, keys } => ("claim", after_grace(kept_for), size, keys),
            Verb::Commit { attempt } => ("commit", Duration::ZERO, attempt, &[]),
            Verb::Retire { attempt } => ("retire", Duration::ZERO, attempt, &[]),
            Verb::Cancel => ("cancel", GRACE, 0, &[]),
        };
        let mut arguments = vec![
            Argument::Text(op.to_string()),
            Argument::Word(name),
            ms(ttl),
            Argument::Figure(figure),
        ];
        arguments.extend(charged.iter().cloned().map(Argument::Text));
        Self {
            script: &DIRECTORY,
            keys: vec![key],
            arguments,
        }
    }

    pub(super) fn probe(prefix: &str) -> Self {
        let keys = vec![format!("{prefix}:ping"), format!("{prefix}:ping:slots")];
        Self {
            script: &PROBE,
            keys,
            arguments: vec![Argument::Word("probe")],
        }
    }

    /// The command that runs it: by its name, or with its whole text, which the server then knows.
    pub(super) fn command(&self, with_text: bool) -> redis::Cmd {
        let mut command = redis::cmd(if with_text { "EVAL" } else { "EVALSHA" });
        command.arg(if with_text {
            self.script.source
        } else {
            &self.script.sha
        });
        command.arg(self.keys.len()).arg(&self.keys).arg(&self.arguments);
        command
    }

    /// The answer without its echo, or `None` if it is an answer to something else.
    pub(super) fn answer(&self, value: Value) -> Option<Answer> {
        let Value::Array(values) = value else { return None };
        let mut values = values.into_iter();
        let echo = text(values.next()?)?;
        self.arguments.first()?.is_echoed_by(&echo).then_some(())?;
        let word = text(values.next()?)?;
        let (mut figures, mut names) = (Vec::new(), Vec::new());
        for value in values {
            match value {
                Value::Int(figure) => figures.push(u64::try_from(figure).ok()?),
                value => names.push(text(value)?),
            }
        }
        Some(Answer { word, figures, names })
    }
}

/// What a script says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) word: String,
    pub(super) figures: Vec<u64>,
    pub(super) names: Vec<String>,
}

impl Answer {
    /// As the answer to the charge of a plan, or `None` if it isn't one.
    pub(super) fn charged(&self, plan: &ChargePlan) -> Option<Charged> {
        let entries = plan.entries.len();
        let (block, figures) = match self.figures.split_first() {
            Some((admissions, figures)) if self.word == "block" => (Some(*admissions), figures),
            _ => (None, self.figures.as_slice()),
        };
        let states = self.names.is_empty().then(|| states(figures))??;
        let exhausted = states.iter().any(|state| state.exhausted);
        match (self.word.as_str(), block, plan.asked_block()) {
            ("block", Some(admissions), Some(ask))
                if states.len() == entries && !exhausted && (admissions > 0 || ask.ahead) =>
            {
                Some(Charged::Block { admissions, states })
            }
            ("granted", None, None) if states.len() == entries && !exhausted => Some(Charged::Granted(states)),
            ("denied", ..) if states.len() == entries && exhausted => Some(Charged::Denied(states)),
            ("cancelled", ..) if states.is_empty() => Some(Charged::Cancelled),
            _ => None,
        }
    }

    /// As the answer to a look at so many entries: where they stand, or nothing if the operation takes nothing more there.
    pub(super) fn looked(&self, entries: usize) -> Option<Option<Vec<EntryState>>> {
        let figures = match (self.word.as_str(), self.figures.split_first()) {
            ("cancelled", None) => return Some(None),
            ("block", Some((_, figures))) => figures,
            ("denied", _) => self.figures.as_slice(),
            _ => return None,
        };
        let states = self.names.is_empty().then(|| states(figures))??;
        (states.len() == entries).then_some(Some(states))
    }

    /// As the answer of a script that has nothing to say.
    pub(super) fn done(&self) -> Option<()> {
        (self.word == "done").then_some(())
    }

    /// As the answer to a renewal: whether every slot was still held.
    pub(super) fn kept(&self) -> Option<bool> {
        match self.word.as_str() {
            "kept" => Some(true),
            "lost" => Some(false),
            _ => None,
        }
    }
}

fn states(figures: &[u64]) -> Option<Vec<EntryState>> {
    let state = |three: &[u64]| match three {
        [used, reset_ms, exhausted @ (0 | 1)] => Some(EntryState {
            used: *used,
            reset_ms: *reset_ms,
            exhausted: *exhausted == 1,
        }),
        _ => None,
    };
    figures.chunks(3).map(state).collect()
}

fn ms(duration: Duration) -> Argument {
    Argument::Figure(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

fn text(value: Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use portcullis_decision::charge::BlockAsk;
    use portcullis_decision::limits::Scope;
    use portcullis_decision::rules::Gate;

    use super::*;

    const OP: &str = "000102030405060708090a0b0c0d0e0f";

    fn cancel() -> Call {
        Call::cancel(&Place::single("p", OperationId::parse(OP).unwrap()))
    }

    fn plan(block: Option<BlockAsk>) -> ChargePlan {
        ChargePlan {
            op: OperationId::parse(OP).unwrap(),
            entries: vec![ChargeEntry {
                gate: Gate::Contract,
                scope: Scope::Owner,
                resource: Resource::Requests,
                key: "k".to_owned(),
                limit: 100,
                cost: 1,
                window_s: 60,
            }],
            block,
        }
    }

    fn words(words: &[&str]) -> Value {
        Value::Array(
            words
                .iter()
                .map(|word| Value::BulkString(word.as_bytes().to_vec()))
                .collect(),
        )
    }

    #[test]
    fn an_answer_to_another_operation_is_none() {
        assert!(cancel().answer(words(&[OP, "done"])).is_some());
        for other in [
            words(&["ff", "done"]),
            words(&[OP]),
            words(&[]),
            Value::Okay,
            Value::Nil,
        ] {
            assert_eq!(cancel().answer(other.clone()), None, "{other:?}");
        }
    }

    #[test]
    fn a_charge_is_only_believed_if_word_and_figures_agree() {
        let one_entry = plan(None);
        let block = |ahead| {
            let (most, parts) = (64, 8);
            plan(Some(BlockAsk { most, parts, ahead }))
        };
        let answer = |word: &str, figures: &[u64]| Answer {
            word: word.to_owned(),
            figures: figures.to_vec(),
            names: Vec::new(),
        };
        let state = EntryState {
            used: 3,
            reset_ms: 7,
            exhausted: true,
        };
        assert_eq!(
            answer("denied", &[3, 7, 1]).charged(&one_entry),
            Some(Charged::Denied(vec![state]))
        );
        assert_eq!(answer("cancelled", &[]).charged(&one_entry), Some(Charged::Cancelled));
        for (word, figures) in [
            ("denied", &[3, 7, 0][..]),
            ("granted", &[3, 7, 1]),
            ("granted", &[3, 7]),
            ("granted", &[3, 7, 2]),
            ("granted", &[]),
            ("done", &[3, 7, 0]),
        ] {
            assert_eq!(answer(word, figures).charged(&one_entry), None, "{word} {figures:?}");
        }
        let fits = EntryState {
            exhausted: false,
            ..state
        };
        for (admissions, ahead, believed) in [(9, false, true), (1, false, true), (0, true, true), (0, false, false)] {
            let charged = believed.then(|| Charged::Block {
                admissions,
                states: vec![fits],
            });
            let words = answer("block", &[admissions, 3, 7, 0]);
            assert_eq!(words.charged(&block(ahead)), charged, "{admissions}");
            assert_eq!(words.charged(&one_entry), None, "nobody asked for a block");
        }
        for figures in [&[9, 3, 7, 1][..], &[3, 7, 0], &[9], &[]] {
            assert_eq!(answer("block", figures).charged(&block(true)), None, "{figures:?}");
        }
        assert_eq!(answer("granted", &[3, 7, 0]).charged(&block(false)), None);
    }

    /// An argument as the server reads it.
    fn sent(argument: &Argument) -> String {
        let words = argument.to_redis_args();
        assert_eq!(words.len(), 1, "{argument:?}");
        String::from_utf8(words[0].clone()).unwrap()
    }

    #[test]
    fn no_time_of_this_process_goes_into_a_script() {
        // Clocks of service processes differ; a duration is the same everywhere.
        let plan = ChargePlan {
            op: OperationId::parse(OP).unwrap(),
            entries: Vec::new(),
            block: None,
        };
        let ttl = Duration::from_secs(30);
        let back = Return {
            id: plan.op,
            lease: OperationId::from_random([9; 16]),
            requests: u64::MAX,
            tokens: i64::MIN,
        };
        let at = Place::single("p", plan.op);
        let calls = || {
            [
                Call::charge(&at, &plan, ttl),
                cancel(),
                Call::settle(&at, Some(7)),
                Call::renew(&at, ttl),
                Call::part(&Place::single("p", back.lease), back),
            ]
            .map(|call| call.arguments.iter().map(sent).collect::<Vec<_>>())
        };
        let first = calls();
        assert_eq!(first, calls());
        assert_eq!(first[0], [OP, "30000", "60000"]);
        assert_eq!(first[2], [OP, "7"]);
        assert_eq!(first[3], [OP, "30000", "60000"]);
        // The largest that the script's numbers tell apart.
        assert_eq!(first[4], [OP, "9007199254740992", "-9007199254740992", "60000"]);
    }
}
