# The course and its pinned versions, for a machine with Docker or Podman:
#
#   docker build -t dlojz .
#   docker run --rm -it --gpus all --ipc=host --user "$(id -u):$(id -g)" -p 127.0.0.1:8888:8888 \
#     -v "$PWD":/course dlojz
#
# --gpus all: leave it out without a GPU. --ipc=host: the loader's workers pass batches through shared
# memory. --user: the course's folder is mounted, and what jobs write in it is to be yours; a Podman
# without root does that by itself, so leave it out there. slurm/apptainer.def is the same for clusters.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ procps \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE idr_torch.py /opt/dlojz/
COPY dlojz /opt/dlojz/dlojz
RUN python -m pip install --no-cache-dir -c /opt/dlojz/constraints.txt uv \
    && uv pip install --system --no-cache --compile-bytecode -c /opt/dlojz/constraints.txt /opt/dlojz

WORKDIR /course
# A user who is a number only has no home and no name: JupyterLab wants the one, torch the other.
ENV LC_ALL=C.UTF-8 DLOJZ_ROOT=/course HOME=/tmp USER=trainee
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--allow-root", "--no-browser", "--notebook-dir=notebooks"]
