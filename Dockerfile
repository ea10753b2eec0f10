# dpn on a CPU:       docker build -t dpn . && docker run --rm dpn
# dpn on NVIDIA GPUs: docker build -t dpn --build-arg BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime .
#                     docker run --rm --gpus all -v "$PWD:/work" dpn pretrain --data photos
# PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name another package index, such as one of wheels for CPUs only.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1

COPY . /opt/dpn
RUN python3 -m pip install /opt/dpn

# Weights and caches of the user are in the home, runs in the folder that is mounted.
RUN useradd --create-home --uid 1000 dpn && mkdir -p /work && chown dpn /work
USER dpn
WORKDIR /work
ENTRYPOINT ["dpn"]
CMD ["finetune", "vtab", "--data", "demo", "--compare", "none,dpn", "--overwrite"]
