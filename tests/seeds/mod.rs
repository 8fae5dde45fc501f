//! Which seeds a test lives through.

/// A number from the environment, such as `ELASTIC_RS_SIM_SEEDS`.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, must be a number")))
}

/// The seeds that the environment asks for: as many as `ELASTIC_RS_SIM_SEEDS` says from `ELASTIC_RS_SIM_SEED` on.
pub fn asked_for(default: u64) -> std::ops::Range<u64> {
    let first = number("ELASTIC_RS_SIM_SEED", 0);
    first..first + number("ELASTIC_RS_SIM_SEEDS", default)
}
