# stars_fast on a machine with NVIDIA GPUs (NVIDIA's container toolkit on the host):
#   docker build -t stars-fast .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/work/runs" stars-fast train addition-quick
#   docker run --gpus all --ipc=host -v "$PWD/runs:/work/runs" --entrypoint torchrun stars-fast \
#       --nproc-per-node 4 -m stars_fast train ouro-numina
# Kernels: Triton's, which come with torch, and C++ for the CPU. CUDA C++ (STARS_FAST_BUILD=cuda) needs
# CUDA's compiler and headers: build in an image of nvidia/cuda with "devel" in its name.
FROM python:3.12-slim-bookworm AS build
ARG TORCH="torch==2.13.*"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN pip install "$TORCH" --index-url "$TORCH_INDEX" && pip install "setuptools>=77" ninja
COPY . /src
RUN STARS_FAST_BUILD=cpu pip install --no-build-isolation "/src[eval,lora]"

FROM python:3.12-slim-bookworm
# Triton compiles the launcher of a kernel with the machine's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH MPLBACKEND=Agg
WORKDIR /work
ENTRYPOINT ["stars-fast"]
CMD ["--help"]
