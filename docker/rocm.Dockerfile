# The HIP build in an image: docker build -f docker/rocm.Dockerfile -t rlk-rocm .
# Never built so far: no Docker engine was at hand. Its commands are those that CI runs on a Debian 12 machine. The image
# has no ROCm: run it with the host's libamdhip64 in the library path, or on a ROCm base image with clang 19.
FROM debian:12-slim
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates g++ git python3 python3-dev python3-venv libgtest-dev ccache \
      clang-19 lld-19 llvm-19 clang-tools-19 && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /rl_kernel_native
COPY . .
RUN ./scripts/test.sh hip
RUN python3 -m venv /opt/rk && /opt/rk/bin/pip install . -C cmake.define.RLK_VARIANT=rocm6
ENV PATH=/opt/rk/bin:$PATH
CMD ["python", "-m", "rl_kernel_native.doctor"]
