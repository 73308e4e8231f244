//! The script of host calls that fail: which, when, and with which status.

use std::fmt;

/// Statuses of the Proxy-Wasm ABI. A host may return any other number too.
pub mod status {
    /// Done.
    pub const OK: u32 = 0;
    /// No such thing.
    pub const NOT_FOUND: u32 = 1;
    /// An argument that makes no sense.
    pub const BAD_ARGUMENT: u32 = 2;
    /// A map that is not a map.
    pub const PARSE_FAILURE: u32 = 4;
    /// A pointer outside the memory.
    pub const INVALID_MEMORY_ACCESS: u32 = 6;
    /// A value has another version than the write names.
    pub const CAS_MISMATCH: u32 = 8;
    /// Something else went wrong in the host.
    pub const INTERNAL_FAILURE: u32 = 10;
    /// The host has no such call.
    pub const UNIMPLEMENTED: u32 = 12;
    /// Every status that a test of "any failure" tries; 255 is in no specification.
    pub const FAILURES: [u32; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 255];
}

/// One host call, before it is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The import's name.
    pub name: &'static str,
    /// Which call of this name it is, from 1.
    pub nth: u64,
    /// The context that it acts on.
    pub context: u32,
    /// The callback that makes it.
    pub callback: &'static str,
}

type Choose = Box<dyn FnMut(&Call) -> Option<u32>>;

enum Rule {
    Always(u32),
    /// The calls left until the one that fails, and its status.
    Nth(u64, u32),
    When(Choose),
}

/// Which calls fail. Rules are asked in the order in which they were made; the first that has a status decides.
#[derive(Default)]
pub struct Faults {
    rules: Vec<(&'static str, Rule)>,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.rules.iter().map(|(name, _)| name)).finish()
    }
}

impl Faults {
    /// Every call of this name fails.
    pub fn always(&mut self, name: &'static str, status: u32) {
        self.rules.push((name, Rule::Always(status)));
    }

    /// The next call of this name fails, and no later one.
    pub fn once(&mut self, name: &'static str, status: u32) {
        self.nth(name, 1, status);
    }

    /// The n-th call of this name from now on fails, counted from 1, and no other.
    pub fn nth(&mut self, name: &'static str, n: u64, status: u32) {
        assert!(n > 0, "calls are counted from 1");
        self.rules.push((name, Rule::Nth(n, status)));
    }

    /// Calls fail for which the closure has a status. The name `*` stands for every call.
    pub fn when(&mut self, name: &'static str, choose: impl FnMut(&Call) -> Option<u32> + 'static) {
        self.rules.push((name, Rule::When(Box::new(choose))));
    }

    /// Calls of this name work again.
    pub fn heal(&mut self, name: &'static str) {
        self.rules.retain(|(of, _)| *of != name);
    }

    /// Everything works again.
    pub fn heal_all(&mut self) {
        self.rules.clear();
    }

    /// The status with which a call fails, if it does.
    pub(crate) fn ask(&mut self, call: Call) -> Option<u32> {
        let name = call.name;
        let mut verdict = None;
        for (_, rule) in self.rules.iter_mut().filter(|(of, _)| *of == name || *of == "*") {
            let status = match rule {
                Rule::Always(status) => Some(*status),
                Rule::Nth(left, status) => {
                    *left = left.saturating_sub(1);
                    (*left == 0).then_some(*status)
                }
                Rule::When(choose) => choose(&call),
            };
            verdict = verdict.or(status);
        }
        self.rules.retain(|(_, rule)| !matches!(rule, Rule::Nth(0, _)));
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_fails_always_or_the_nth_time_or_when_a_closure_says_so() {
        let mut faults = Faults::default();
        faults.nth("a", 2, 5);
        faults.when("*", |call| (call.name == "b" && call.nth == 1).then_some(7));
        let mut counts = [("a", 0), ("b", 0)];
        let mut ask = |faults: &mut Faults, name| {
            let (_, nth) = counts.iter_mut().find(|(of, _)| *of == name).expect("one of them");
            *nth += 1;
            let call = Call {
                name,
                nth: *nth,
                context: 1,
                callback: "tick",
            };
            faults.ask(call)
        };
        assert_eq!(
            [ask(&mut faults, "a"), ask(&mut faults, "a"), ask(&mut faults, "a")],
            [None, Some(5), None]
        );
        assert_eq!([ask(&mut faults, "b"), ask(&mut faults, "b")], [Some(7), None]);
        faults.always("a", 1);
        assert_eq!([ask(&mut faults, "a"), ask(&mut faults, "a")], [Some(1), Some(1)]);
        faults.heal("a");
        assert_eq!(ask(&mut faults, "a"), None);
    }
}
