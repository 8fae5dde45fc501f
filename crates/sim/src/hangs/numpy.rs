//! numpy's generator: `default_rng(seed)` and those of its distributions that the made-up jobs are drawn from, so that their seeds mean
//! here what they mean in the prototype. The tables of the ziggurat are computed; they differ from numpy's in the last digit at most.

use std::sync::LazyLock;

/// PCG64 (XSL-RR 128/64), seeded as numpy's `SeedSequence` does.
#[derive(Clone, Debug)]
pub struct Generator {
    state: u128,
    increment: u128,
    /// The upper half of a number of which the lower half was used.
    half: Option<u32>,
}

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

impl Generator {
    /// `default_rng(seed)`, of a seed below 2^32.
    pub fn new(seed: u32) -> Self {
        let words = seed_sequence(seed);
        let pair = |at: usize| u128::from(words[at]) << 64 | u128::from(words[at + 1]);
        let mut generator = Self { state: 0, increment: pair(2) << 1 | 1, half: None };
        generator.step();
        generator.state = generator.state.wrapping_add(pair(0));
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn number(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    fn half_number(&mut self) -> u32 {
        self.half.take().unwrap_or_else(|| {
            let number = self.number();
            self.half = Some((number >> 32) as u32);
            number as u32
        })
    }

    /// `random()`: from 0 to below 1.
    pub fn random(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `uniform(low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.random()
    }

    /// `integers(low, high)`: from `low` to below `high`.
    pub fn integers(&mut self, low: u32, high: u32) -> u32 {
        let size = high - low;
        let mut scaled = u64::from(self.half_number()) * u64::from(size);
        if (scaled as u32) < size {
            let threshold = (u32::MAX - (size - 1)) % size;
            while (scaled as u32) < threshold {
                scaled = u64::from(self.half_number()) * u64::from(size);
            }
        }
        low + (scaled >> 32) as u32
    }

    /// `standard_normal()`.
    pub fn normal(&mut self) -> f64 {
        let tables = &*NORMAL;
        loop {
            let number = self.number();
            let strip = (number & 0xff) as usize;
            let is_negative = number >> 8 & 1 == 1;
            let size = number >> 9 & 0x000f_ffff_ffff_ffff;
            let x = size as f64 * tables.width[strip];
            let x = if is_negative { -x } else { x };
            if size < tables.inside[strip] {
                return x;
            }
            if strip > 0 {
                let [above, here] = [tables.height[strip - 1], tables.height[strip]];
                if (above - here) * self.random() + here < (-0.5 * x * x).exp() {
                    return x;
                }
                continue;
            }
            loop {
                let beyond = -(-self.random()).ln_1p() / NORMAL_TAIL;
                let y = -(-self.random()).ln_1p();
                if y + y > beyond * beyond {
                    return if size >> 8 & 1 == 1 { -(NORMAL_TAIL + beyond) } else { NORMAL_TAIL + beyond };
                }
            }
        }
    }

    /// `standard_exponential()`.
    pub fn exponential(&mut self) -> f64 {
        let tables = &*EXPONENTIAL;
        loop {
            let number = self.number() >> 3;
            let strip = (number & 0xff) as usize;
            let size = number >> 8;
            let x = size as f64 * tables.width[strip];
            if size < tables.inside[strip] {
                return x;
            }
            if strip == 0 {
                return EXPONENTIAL_TAIL - (-self.random()).ln_1p();
            }
            let [above, here] = [tables.height[strip - 1], tables.height[strip]];
            if (above - here) * self.random() + here < (-x).exp() {
                return x;
            }
        }
    }

    /// `lognormal(0, sigma)`.
    pub fn lognormal(&mut self, sigma: f64) -> f64 {
        (sigma * self.normal()).exp()
    }

    /// `pareto(a)`.
    pub fn pareto(&mut self, a: f64) -> f64 {
        (self.exponential() / a).exp_m1()
    }
}

/// The first four words of numpy's `SeedSequence` of one number.
fn seed_sequence(seed: u32) -> [u64; 4] {
    const XSHIFT: u32 = 16;
    let mut constant = 0x43b0_d7e5_u32;
    let mut hashed = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        let value = value.wrapping_mul(constant);
        value ^ value >> XSHIFT
    };
    let mixed = |x: u32, y: u32| {
        let value = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
        value ^ value >> XSHIFT
    };
    let mut pool = [seed, 0, 0, 0].map(&mut hashed);
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            pool[to] = mixed(pool[to], hashed(pool[from]));
        }
    }
    let mut constant = 0x8b51_f9dd_u32;
    let mut word = |at: usize| {
        let value = pool[at % 4] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        let value = value.wrapping_mul(constant);
        u64::from(value ^ value >> XSHIFT)
    };
    let halves: Vec<u64> = (0..8).map(&mut word).collect();
    [0, 1, 2, 3].map(|at| halves[2 * at] | halves[2 * at + 1] << 32)
}

/// Where the tails begin, and the area of a strip: of the normal distribution's density without its factor, and of the exponential's.
const NORMAL_TAIL: f64 = 3.654_152_885_361_009;
const NORMAL_AREA: f64 = 0.004_928_673_233_974_655;
const EXPONENTIAL_TAIL: f64 = 7.697_117_470_131_05;
const EXPONENTIAL_AREA: f64 = 0.003_949_659_822_581_557;

/// A distribution cut into 256 strips of one area. The first one has the tail.
struct Ziggurat {
    /// Of each strip, its width in so many parts as a number has.
    width: Vec<f64>,
    /// Numbers below this are inside of the next strip, too.
    inside: Vec<u64>,
    height: Vec<f64>,
}

static NORMAL: LazyLock<Ziggurat> = LazyLock::new(|| {
    Ziggurat::new(NORMAL_TAIL, NORMAL_AREA, 1_u64 << 52, |x| (-0.5 * x * x).exp(), |y| (-2.0 * y.ln()).sqrt())
});
static EXPONENTIAL: LazyLock<Ziggurat> =
    LazyLock::new(|| Ziggurat::new(EXPONENTIAL_TAIL, EXPONENTIAL_AREA, 1 << 53, |x| (-x).exp(), |y| -y.ln()));

impl Ziggurat {
    fn new(tail: f64, area: f64, parts: u64, density: fn(f64) -> f64, inverse: fn(f64) -> f64) -> Self {
        let parts = parts as f64;
        let mut edges = [0.0; 256];
        edges[255] = tail;
        for at in (1..255).rev() {
            edges[at] = inverse(area / edges[at + 1] + density(edges[at + 1]));
        }
        let bottom = area / density(tail);
        let mut tables =
            Self { width: vec![bottom / parts], inside: vec![(tail / bottom * parts) as u64], height: vec![1.0] };
        for at in 1..256 {
            tables.width.push(edges[at] / parts);
            tables.inside.push((edges[at - 1] / edges[at] * parts) as u64);
            tables.height.push(density(edges[at]));
        }
        tables
    }
}
