# One image for every service of docker-compose.yml: migrate, mlflow, dashboard and workers.
#   docker build .                                   # torch for the CPU
#   docker build --build-arg TORCH_BACKEND=cu130 .   # torch with CUDA
#   docker build --build-arg TORCH_BACKEND=cu126 .   # another build, of which constraints-torch.txt has no hashes
#   docker build --build-arg PACKAGES="rdkit timm" . # and what your objectives import
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
WORKDIR /src
COPY constraints.txt constraints-torch.txt pyproject.toml hpsearch ./
# Each package is compared with its hash in the constraints.
RUN grep '^uv==' constraints.txt > uv.in && python hpsearch hashes < uv.in > uv.txt \
    && pip install --no-cache-dir --require-hashes --requirement uv.txt \
    && python -m venv --without-pip /opt/hpsearch && python hpsearch requirements server > direct.txt
# The packages are a layer of their own: a change of the code leaves it as it is.
ARG TORCH_BACKEND=cpu
RUN --mount=type=cache,target=/root/.cache/uv \
    case "${TORCH_BACKEND}" in \
    cpu | cu130) \
    uv pip compile --quiet --no-annotate --no-build --python /opt/hpsearch --torch-backend "${TORCH_BACKEND}" \
    --constraint constraints.txt --constraint constraints-torch.txt --output-file resolved.txt direct.txt \
    && python hpsearch hashes < resolved.txt > hashed.txt \
    && uv pip install --python /opt/hpsearch --torch-backend "${TORCH_BACKEND}" \
    --require-hashes --no-deps --requirement hashed.txt ;; \
    *) : > constraints-torch.txt \
    && uv pip install --python /opt/hpsearch --torch-backend "${TORCH_BACKEND}" \
    --constraint constraints.txt --requirement direct.txt ;; \
    esac
ARG PACKAGES=""
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/uv \
    [ -z "${PACKAGES}" ] || uv pip install --python /opt/hpsearch --torch-backend "${TORCH_BACKEND}" \
    --constraint constraints.txt --constraint constraints-torch.txt torch==2.13.0 ${PACKAGES}
COPY README.md LICENSE ./
COPY objectives objectives
COPY search search
COPY storage storage
COPY src src
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --python /opt/hpsearch --no-build-isolation --no-deps .

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
