# Environment servers, without torch. Each image also has `starpod load`.
#   --target environment       the symbolic environments
#   --target machines          tasks in containers; it needs the socket of an engine
#   --target webshop           the shop
#   --target webshop-browser   the shop, as text and as pages in Chromium
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Extract the lists of packages from pyproject.toml, so that the layers with packages are rebuilt only if these lists change,
# and not at each other change of that file.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py server http mcp tracing load > environment.txt \
 && python requirements.py containers > containers.txt \
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

# The user starpod can change no file, so the root file system may be read-only. The packages' tests are deleted, since they
# are a tenth of the image.
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

FROM server AS machines
COPY --from=requirements /requirements/containers.txt ./
RUN python -m pip --python bin/python install --quiet --no-cache-dir -c constraints/main.txt -r containers.txt
COPY --from=wheel /wheel wheel
RUN python -m pip --python bin/python install --quiet --no-cache-dir --no-deps wheel/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod machines" \
      org.opencontainers.image.description="Tasks in containers for LLM agents, served over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 1000:1000
CMD ["serve", "harbor:/tasks", "--host", "0.0.0.0", "--metrics-port", "9100"]

# The first start builds stores and compiles code, and keeps both in the volume /stores.
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
# Chromium's own sandbox needs privileges that a container lacks. The container is the sandbox instead.
ENV STARPOD_BROWSER_FLAGS=--no-sandbox
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Starpod webshop with a browser" \
      org.opencontainers.image.description="A shop for LLM agents with pictures of its pages, served over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 1000:1000
CMD ["serve", "webshop", "webshop-browser", "--host", "0.0.0.0", "--metrics-port", "9100"]
