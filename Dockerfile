# syntax=docker/dockerfile:1
# An image with PyTorch and elastic_rs, for examples/kubernetes and other engines that run containers:
#
#   docker build --tag example.org/train:latest .
#
# Your own image needs only what the last stage does: install the wheel. BASE is any image with PyTorch 2.6 to 2.15,
# Python >= 3.11 and glibc >= 2.34 (Ubuntu 22.04, Debian 12).
ARG BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime

FROM rust:1.88-bookworm AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /venv && /venv/bin/pip install --no-cache-dir 'maturin>=1.16,<2'
WORKDIR /src
COPY Cargo.toml Cargo.lock pyproject.toml README.md LICENSE ./
COPY benches benches
COPY crates crates
COPY examples examples
COPY python python
COPY src src
COPY tests tests
RUN /venv/bin/maturin build --release --locked --interpreter python3 --out /wheels

FROM ${BASE}
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/elastic_rs-*.whl && rm -r /wheels && elastic-run --help >/dev/null
WORKDIR /workspace
# As process 1 the agent handles signals, and reaps orphans.
ENTRYPOINT ["elastic-run"]
CMD ["doctor"]
