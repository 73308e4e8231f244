//! What usage costs, in micro-dollars.
//!
//! Left out on purpose: what an unknown price or an unknown usage costs (a rule's choice), and a provider's surcharges: the
//! price list has one price for input, so writing to a prompt cache costs what input costs.

use crate::policy::Price;
use crate::usage::Usage;

/// Prices are for this many tokens.
const TOKENS_PER_PRICE: u128 = 1_000_000;

/// The cost of a usage, rounded up once, at most `u64::MAX`; `None` if input or output is unknown.
///
/// Cached input is the part of the input that costs less ([`Usage`] is normalized so for every provider). How much was
/// cached counts only if it is known; else all input costs its full price.
pub fn cost_micro_dollars(usage: &Usage, price: &Price) -> Option<u64> {
    let (input, output) = (usage.input?, usage.output?);
    let cached = usage.cached_input.unwrap_or(0).min(input);
    let of = |tokens: u64, price: u64| u128::from(tokens).saturating_mul(u128::from(price));
    let sum = of(input.saturating_sub(cached), price.input)
        .saturating_add(of(cached, price.cached_input))
        .saturating_add(of(output, price.output));
    Some(u64::try_from(sum.div_ceil(TOKENS_PER_PRICE)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRICE: Price = Price {
        input: 2_500_000,
        cached_input: 1_250_000,
        output: 10_000_000,
    };

    fn usage(input: u64, cached: Option<u64>, output: u64) -> Usage {
        Usage {
            input: Some(input),
            cached_input: cached,
            output: Some(output),
            is_complete: true,
        }
    }

    #[test]
    fn cached_input_costs_its_own_price() {
        assert_eq!(
            cost_micro_dollars(&usage(1_000_000, None, 100_000), &PRICE),
            Some(3_500_000)
        );
        assert_eq!(
            cost_micro_dollars(&usage(1_000_000, Some(400_000), 0), &PRICE),
            Some(2_000_000)
        );
    }

    #[test]
    fn it_is_rounded_up_once() {
        let price = Price {
            input: 1,
            cached_input: 1,
            output: 1,
        };
        assert_eq!(cost_micro_dollars(&usage(2, Some(1), 1), &price), Some(1));
        assert_eq!(cost_micro_dollars(&usage(0, None, 0), &price), Some(0));
        assert_eq!(cost_micro_dollars(&usage(999_999, None, 2), &price), Some(2));
    }

    #[test]
    fn it_neither_overflows_nor_guesses() {
        let dear = Price {
            input: u64::MAX,
            cached_input: u64::MAX,
            output: u64::MAX,
        };
        assert_eq!(
            cost_micro_dollars(&usage(u64::MAX, Some(u64::MAX), u64::MAX), &dear),
            Some(u64::MAX)
        );
        assert_eq!(
            cost_micro_dollars(&usage(1, Some(5), 0), &PRICE),
            Some(2),
            "more cached than input"
        );
        let unknown = Usage {
            output: None,
            ..usage(1, None, 1)
        };
        assert_eq!(cost_micro_dollars(&unknown, &PRICE), None);
    }
}
