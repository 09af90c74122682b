# Two images from one file: `task-app` (environments; no torch) and `trainer` (torch, jobs, the dashboard).
#
#   docker build --target task-app -t turnwise-task-app .
#   docker build --target trainer  -t turnwise-trainer  .
#
# Without a GPU, pass PyTorch's CPU index, or pip takes the CUDA build (gigabytes):
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... --target trainer -t turnwise-trainer .
#
# EXTRAS are extras of pyproject.toml that both images have: by default what the shipped jobs play.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=PASSIVE MPLCONFIGDIR=/tmp
# The user owns the mount points: a new named volume takes over the owner of the folder that it covers.
# The image's own library has no compiled files, and a health check would compile what it imports every time.
RUN python -m compileall -q "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
  && useradd --uid 10001 --create-home turnwise \
  && mkdir -p /keys/task-app /keys/trainer /keys/database /app/runs /models \
  && chown -R turnwise /keys /app/runs /models
# Nothing of ours yet: what we depend on is installed with this file, and again only when it changes.
WORKDIR /src
COPY pyproject.toml ./
RUN touch README.md && mkdir service_kit shared_schemas task_app trainer_backend turnwise

FROM base AS task-app
# In each stage that reads them: the classic builder hands no argument of a stage on to the next.
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
# A clone that was made under another umask: its files are copied with the modes that they have there.
RUN chmod a+r /usr/local/bin/make-keys /usr/local/bin/health.py
# Not where the sources are: Python would take those, which have no compiled files, for what is installed.
WORKDIR /app
USER turnwise
EXPOSE 8001
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s CMD ["python", "-IS", "/usr/local/bin/health.py", "8001"]
CMD ["python", "-m", "task_app", "--host", "0.0.0.0", "--port", "8001"]

FROM base AS trainer
# Triton compiles the launcher of its kernels with it, for a GPU.
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
# Models of the hub are kept there, beside the runs: gigabytes, which a tmpfs would hold in memory. Compiled
# kernels too, which are loaded like programs: from a tmpfs, which is noexec, they are not.
ENV HF_HOME=/models TRITON_CACHE_DIR=/models/triton
WORKDIR /app
USER turnwise
EXPOSE 8100
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s CMD ["python", "-IS", "/usr/local/bin/health.py", "8100"]
CMD ["sh", "/usr/local/bin/turnwise-trainer"]
