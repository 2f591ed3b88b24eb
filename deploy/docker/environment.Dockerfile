# Environment servers, none of which holds torch:
#   --target environment       the symbolic environments; `starpod load` too, as in the others
#   --target webshop           the shop
#   --target webshop-browser   the shop, also through Chromium
ARG BASE_IMAGE=python:3.11-slim-bookworm

# What is to be installed, apart from all else that pyproject.toml holds: the layers with packages are made again when
# these lists change, and only then.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py server http mcp tracing load > environment.txt \
 && python requirements.py webshop > webshop.txt \
 && python requirements.py browser > browser.txt

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

# A user of its own, and no file that he may change: the root file system can be read-only. Tests of packages are left
# out; they are a tenth of the size.
FROM ${BASE_IMAGE} AS server
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin starpod
WORKDIR /opt/starpod
COPY constraints/main.txt constraints/
COPY --from=requirements /requirements/environment.txt ./
RUN python -m venv --without-pip . \
 && python -m pip --python bin/python install --quiet --no-cache-dir -c constraints/main.txt -r environment.txt \
 && find lib -type d -name tests -prune -exec rm -r {} +
COPY deploy/docker/health.py ./
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 50051 9100
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s CMD ["/opt/starpod/bin/python", "/opt/starpod/health.py"]
ENTRYPOINT ["/opt/starpod/bin/starpod"]

FROM server AS environment
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod environments" \
      org.opencontainers.image.description="Symbolic environments for LLM agents, served over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 1000:1000
CMD ["serve", "--host", "0.0.0.0", "--metrics-port", "9100"]

# Stores and compiled code are kept in /stores, a volume: the first start makes them.
FROM server AS shop
COPY --from=requirements /requirements/webshop.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -c constraints/main.txt -r webshop.txt \
 && find lib -type d -name tests -prune -exec rm -r {} + \
 && install -d -o starpod -g starpod /stores
ENV STARPOD_CACHE=/stores NUMBA_CACHE_DIR=/stores/compiled
VOLUME /stores
CMD ["serve", "webshop", "--host", "0.0.0.0", "--metrics-port", "9100"]

FROM shop AS webshop
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod webshop" \
      org.opencontainers.image.description="A shop for LLM agents, served over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 1000:1000

FROM shop AS webshop-browser
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver \
    fonts-dejavu-core > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=requirements /requirements/browser.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -c constraints/main.txt -r browser.txt
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
# Chromium's own sandbox needs rights that a container does not have: the container is its sandbox.
ENV STARPOD_BROWSER_FLAGS=--no-sandbox
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod webshop with a browser" \
      org.opencontainers.image.description="A shop for LLM agents with pictures of its pages, served over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 1000:1000
CMD ["serve", "webshop", "webshop-browser", "--host", "0.0.0.0", "--metrics-port", "9100"]
