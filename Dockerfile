# One image for every service of docker-compose.yml: migrate, mlflow, dashboard and workers.
#   docker build .                                   # torch for the CPU
#   docker build --build-arg TORCH_BACKEND=cu130 .   # torch with CUDA
#   docker build --build-arg PACKAGES="rdkit timm" . # and what your objectives import
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN pip install --no-cache-dir --constraint constraints.txt uv && python -m venv --without-pip /opt/hpsearch
# The packages are a layer of their own: a change of the code leaves it as it is.
ARG TORCH_BACKEND=cpu
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --python /opt/hpsearch --torch-backend "${TORCH_BACKEND}" \
    --constraint constraints.txt --requirements pyproject.toml --extra server
ARG PACKAGES=""
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/uv \
    [ -z "${PACKAGES}" ] || uv pip install --python /opt/hpsearch --torch-backend "${TORCH_BACKEND}" \
    --constraint constraints.txt ${PACKAGES}
COPY README.md LICENSE ./
COPY objectives objectives
COPY search search
COPY storage storage
COPY src src
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --python /opt/hpsearch --build-constraint constraints.txt --no-deps .

FROM python:${PYTHON}
# New volumes take over the owner of the folder that they are mounted on.
RUN useradd --uid 10001 --create-home hpsearch \
    && install --directory --owner hpsearch --group hpsearch --mode 0700 /artifacts /var/lib/hpsearch
COPY --from=build /opt/hpsearch /opt/hpsearch
ENV PATH=/opt/hpsearch/bin:${PATH} HPSEARCH_HOME=/var/lib/hpsearch PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/hpsearch
ENTRYPOINT ["hpsearch"]
CMD ["--help"]
