# The course and its pinned versions, for a machine with Docker or Podman:
#
#   docker build -t dlojz .
#   docker run --rm -it --gpus all --ipc=host -p 8888:8888 -v "$PWD":/course dlojz
#
# --ipc=host: the loader's workers pass batches through shared memory. The course's folder is mounted,
# so what you edit and what jobs write is yours. slurm/apptainer.def is the same for clusters.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ procps \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE /opt/dlojz/
COPY dlojz /opt/dlojz/dlojz
RUN python -m pip install --no-cache-dir -c /opt/dlojz/constraints.txt uv \
    && uv pip install --system --no-cache --compile-bytecode -c /opt/dlojz/constraints.txt /opt/dlojz

WORKDIR /course
ENV LC_ALL=C.UTF-8 DLOJZ_ROOT=/course
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--allow-root", "--no-browser", "--notebook-dir=notebooks"]
