# Two images from one file: `task-app` (environments; no torch) and `trainer` (torch, jobs, the dashboard).
#
#   docker build --target task-app -t turnwise-task-app .
#   docker build --target trainer  -t turnwise-trainer  .
#
# Without a GPU, pass PyTorch's CPU index, or pip takes the CUDA build (gigabytes):
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... --target trainer -t turnwise-trainer .
#
# EXTRAS are extras of pyproject.toml to install in both images; by default those that the shipped jobs need.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=PASSIVE MPLCONFIGDIR=/tmp
# The user owns the mount points, because a new named volume gets the owner of the folder that it covers.
# The standard library comes without compiled files; without this step each health check would compile its imports again.
RUN python -m compileall -q "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
  && useradd --uid 10001 --create-home turnwise \
  && mkdir -p /keys/task-app /keys/trainer /keys/database /app/runs /models \
  && chown -R turnwise /keys /app/runs /models
# Without our packages: the dependencies are installed in a layer that only a change of pyproject.toml rebuilds.
WORKDIR /src
COPY pyproject.toml ./
RUN touch README.md && mkdir service_kit shared_schemas task_app trainer_backend turnwise

FROM base AS task-app
# Each stage declares the arguments that it reads: the classic builder passes none from one stage to the next.
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=babyai,gym
RUN pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}"
COPY service_kit service_kit
COPY shared_schemas shared_schemas
COPY task_app task_app
COPY trainer_backend trainer_backend
COPY turnwise turnwise
COPY configs configs
COPY README.md LICENSE ./
RUN pip install --no-cache-dir --no-deps --force-reinstall . && rm -rf build *.egg-info
COPY docker/make-keys.sh /usr/local/bin/make-keys
COPY docker/health.py /usr/local/bin/health.py
# Files are copied with the modes that they have in the clone, whose umask may have made them unreadable to others.
RUN chmod a+r /usr/local/bin/make-keys /usr/local/bin/health.py
# Not /src: Python would import the sources there, which have no compiled files, and not the installed packages.
WORKDIR /app
USER turnwise
EXPOSE 8001
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s CMD ["python", "-IS", "/usr/local/bin/health.py", "8001"]
CMD ["python", "-m", "task_app", "--host", "0.0.0.0", "--port", "8001"]

FROM base AS trainer
# On a GPU, Triton compiles the launcher of its kernels with this compiler.
RUN apt-get update \
  && apt-get install -y --no-install-recommends gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=babyai,gym
RUN pip install --no-cache-dir ".[trainer${EXTRAS:+,$EXTRAS}]"
COPY service_kit service_kit
COPY shared_schemas shared_schemas
COPY task_app task_app
COPY trainer_backend trainer_backend
COPY turnwise turnwise
COPY configs configs
COPY README.md LICENSE ./
RUN pip install --no-cache-dir --no-deps --force-reinstall . && rm -rf build *.egg-info
COPY docker/trainer.sh /usr/local/bin/turnwise-trainer
COPY docker/demo.sh /usr/local/bin/post-demo
COPY docker/health.py /usr/local/bin/health.py
RUN chmod a+rx /usr/local/bin/turnwise-trainer /usr/local/bin/post-demo /usr/local/bin/health.py
# Models of the hub and compiled kernels are kept in a volume. In a tmpfs the models would take gigabytes of memory, and
# the kernels could not be loaded, because a tmpfs is mounted noexec.
ENV HF_HOME=/models TRITON_CACHE_DIR=/models/triton
WORKDIR /app
USER turnwise
EXPOSE 8100
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s CMD ["python", "-IS", "/usr/local/bin/health.py", "8100"]
CMD ["sh", "/usr/local/bin/turnwise-trainer"]
