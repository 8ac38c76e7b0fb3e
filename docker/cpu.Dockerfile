# The CPU build in an image: docker build -f docker/cpu.Dockerfile -t rlk-cpu .
# Never built so far: no Docker engine was at hand. Its commands are those that CI runs on a Debian 12 machine.
FROM debian:12-slim
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates g++ git python3 python3-dev python3-venv libgtest-dev ccache && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /rl_kernel_native
COPY . .
RUN ./scripts/test.sh lint cpp python
ENV PATH=/rl_kernel_native/.venv/bin:$PATH
CMD ["python", "-m", "rl_kernel_native.doctor"]
