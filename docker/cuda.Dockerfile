# The CUDA build in an image: docker build -f docker/cuda.Dockerfile -t rlk-cuda .
# Never built so far: no Docker engine was at hand. Its commands are those that CI runs on a Debian 12 machine.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates g++ git python3 python3-dev python3-venv libgtest-dev ccache && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /rl_kernel_native
COPY . .
RUN ./scripts/test.sh cuda
RUN python3 -m venv /opt/rk && /opt/rk/bin/pip install . -C cmake.define.RLK_VARIANT=cu130
ENV PATH=/opt/rk/bin:$PATH
CMD ["python", "-m", "rl_kernel_native.doctor"]
