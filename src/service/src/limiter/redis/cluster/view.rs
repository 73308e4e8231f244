//! Who owns which slot, as a member of the cluster tells it.
//!
//! Left out on purpose: whom to ask, and when (`members`).

use redis::Value;

use super::slot::SLOTS;
use crate::limiter::redis::fault::Address;

/// What one member says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    /// Whether it thinks that the cluster works. One that is cut off from the others does not.
    is_ok: bool,
    /// Grows with each change of ownership.
    epoch: u64,
    /// The owner of each slot, by its place among the primaries.
    owners: Vec<Option<usize>>,
    primaries: Vec<Address>,
}

impl View {
    /// Reads the answers to `CLUSTER INFO` and `CLUSTER SLOTS`. A member without a name of its own is who was asked, `asked`.
    pub(super) fn read(info: &str, slots: &Value, asked: &str) -> Option<Self> {
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
        };
        let mut view = Self {
            is_ok: field("cluster_state")? == "ok",
            epoch: field("cluster_current_epoch")?.parse().ok()?,
            owners: vec![None; usize::from(SLOTS)],
            primaries: Vec::new(),
        };
        let Value::Array(ranges) = slots else { return None };
        for range in ranges {
            let Value::Array(range) = range else { return None };
            let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = range.as_slice() else {
                return None;
            };
            let [host, Value::Int(port), ..] = primary.as_slice() else {
                return None;
            };
            let host = match host {
                Value::BulkString(host) => std::str::from_utf8(host).ok()?,
                Value::SimpleString(host) => host.as_str(),
                Value::Nil => "",
                _ => return None,
            };
            // The server's words for a name that it has none of.
            let host = if matches!(host, "" | "?") { asked } else { host };
            let address = (host.to_owned(), u16::try_from(*port).ok()?);
            let known = view.primaries.iter().position(|primary| *primary == address);
            let owner = known.unwrap_or_else(|| {
                view.primaries.push(address);
                view.primaries.len().saturating_sub(1)
            });
            let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
            let owned = view.owners.get_mut(first..=last).filter(|owned| !owned.is_empty());
            owned?.fill(Some(owner));
        }
        Some(view)
    }

    /// The better of two is by a member that is part of a working cluster, and by the one that knows of the last change.
    pub(super) fn rank(&self) -> (bool, u64, usize) {
        (self.is_ok, self.epoch, self.owners.iter().flatten().count())
    }

    /// Whether every slot is owned by somebody, in a cluster that works.
    pub(super) fn is_whole(&self) -> bool {
        self.is_ok && self.owners.iter().all(Option::is_some)
    }

    /// Who owns a slot.
    pub(super) fn owner(&self, slot: u16) -> Option<&Address> {
        self.primaries.get((*self.owners.get(usize::from(slot))?)?)
    }

    /// All owners, each with one of its slots: another one with each `turn`.
    pub(super) fn primaries(&self, turn: usize) -> impl Iterator<Item = (&Address, u16)> {
        self.primaries.iter().enumerate().filter_map(move |(at, address)| {
            let owned = || (0..SLOTS).filter(|slot| self.owners.get(usize::from(*slot)) == Some(&Some(at)));
            let nth = turn.checked_rem(owned().count())?;
            Some((address, owned().nth(nth)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "cluster_state:ok\r\ncluster_slots_assigned:16384\r\ncluster_current_epoch:7\r\n";

    fn range(first: i64, last: i64, host: Value, port: i64) -> Value {
        let member = Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".to_vec())]);
        Value::Array(vec![Value::Int(first), Value::Int(last), member])
    }

    fn named(host: &str) -> Value {
        Value::BulkString(host.as_bytes().to_vec())
    }

    #[test]
    fn slots_have_the_owners_that_a_member_names() {
        let slots = Value::Array(vec![
            range(0, 9_999, named("a"), 1),
            range(10_000, 10_000, Value::Nil, 2),
            range(10_001, 16_383, named("a"), 1),
        ]);
        let view = View::read(INFO, &slots, "asked").unwrap();
        let at = |host: &str, port| Some((host.to_owned(), port));
        assert_eq!(view.owner(0).cloned(), at("a", 1));
        assert_eq!(view.owner(10_000).cloned(), at("asked", 2));
        assert_eq!(view.owner(16_383).cloned(), at("a", 1));
        assert_eq!(view.owner(16_384), None);
        assert!(view.is_whole());
        for turn in [0, 1, 16_382, 99_999] {
            let owned: Vec<u16> = view.primaries(turn).map(|(_, slot)| slot).collect();
            assert_eq!(owned.len(), 2);
            assert!(owned[0] != 10_000 && owned[1] == 10_000, "{owned:?}");
        }
    }

    #[test]
    fn a_cluster_with_a_hole_is_not_whole_and_ranks_below_one_without() {
        let hole = View::read(INFO, &Value::Array(vec![range(0, 99, named("a"), 1)]), "a").unwrap();
        let whole = View::read(INFO, &Value::Array(vec![range(0, 16_383, named("a"), 1)]), "a").unwrap();
        assert!(!hole.is_whole() && hole.owner(100).is_none());
        assert!(whole.rank() > hole.rank());
        let failed = INFO.replace(":ok", ":fail").replace(":7", ":9");
        let failed = View::read(&failed, &Value::Array(vec![range(0, 16_383, named("a"), 1)]), "a").unwrap();
        assert!(whole.rank() > failed.rank() && !failed.is_whole());
    }

    #[test]
    fn what_is_no_view_is_none() {
        for slots in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 16_384, named("a"), 1)]),
            Value::Array(vec![range(5, 4, named("a"), 1)]),
            Value::Array(vec![range(0, 1, named("a"), 70_000)]),
            Value::Array(vec![range(0, 1, Value::Int(3), 1)]),
        ] {
            assert_eq!(View::read(INFO, &slots, "a"), None, "{slots:?}");
        }
        assert_eq!(View::read("ERR", &Value::Array(Vec::new()), "a"), None);
    }
}
