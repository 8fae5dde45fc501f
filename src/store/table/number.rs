//! Numbers as the store keeps them: decimal text.
//!
//! Owns `ADD`'s and `BARRIER`'s reading and writing of values. Mirrors C's `strtoll` in base 10, which PyTorch's
//! servers call through `std::stoll`.

use bytes::Bytes;

/// Reads a number: leading white space, one sign, digits; whatever follows is ignored.
///
/// `None` if there are no digits or the number does not fit.
pub(super) fn parse_decimal(value: &[u8]) -> Option<i64> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r');
    let start = value.iter().position(|byte| !is_space(byte))?;
    let text = &value[start..];
    let (negative, digits) = match text.first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let count = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
    if count == 0 {
        return None;
    }
    // Downwards from zero: i64::MIN has no positive counterpart.
    let below_zero = digits[..count]
        .iter()
        .try_fold(0i64, |number, digit| number.checked_mul(10)?.checked_sub(i64::from(digit - b'0')))?;
    if negative { Some(below_zero) } else { below_zero.checked_neg() }
}

/// Writes a number: no padding, no plus sign.
pub(super) fn decimal(number: i64) -> Bytes {
    Bytes::from(number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `std::stoll` takes in `TCPStoreBackend.cpp`, and the ends of the range.
    #[test]
    fn numbers_are_read_as_strtoll_reads_them() {
        let read: [(&[u8], Option<i64>); 19] = [
            (b"41", Some(41)),
            (b"12abc", Some(12)),
            (b" 42", Some(42)),
            (b"\t\n\x0b\x0c\r 42", Some(42)),
            (b"+7", Some(7)),
            (b"-7", Some(-7)),
            (b"1.9", Some(1)),
            (b"0x10", Some(0)),
            (b"12\x003", Some(12)),
            (b"007", Some(7)),
            (b"9223372036854775807", Some(i64::MAX)),
            (b"-9223372036854775808", Some(i64::MIN)),
            (b"9223372036854775808", None),
            (b"-9223372036854775809", None),
            (b"", None),
            (b"abc", None),
            (b"- 7", None),
            (b"+-7", None),
            (b"   ", None),
        ];
        for (text, number) in read {
            assert_eq!(parse_decimal(text), number, "{:?}", String::from_utf8_lossy(text));
        }
        assert_eq!(decimal(i64::MIN), "-9223372036854775808");
    }
}
