# Two images from one file: `task-app` (environments; no torch) and `trainer` (torch, jobs, the dashboard).
#
#   docker build --target task-app -t turnwise-task-app .
#   docker build --target trainer  -t turnwise-trainer  .
#
# Without a GPU, pass PyTorch's CPU index, or pip takes the CUDA build (gigabytes):
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... --target trainer -t turnwise-trainer .

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=PASSIVE MPLCONFIGDIR=/tmp
WORKDIR /app
# The user owns the mount points: a new named volume takes over the owner of the folder that it covers.
RUN useradd --uid 10001 --create-home turnwise \
  && mkdir -p /keys/task-app /keys/trainer /keys/database /app/runs /models \
  && chown -R turnwise /keys /app/runs /models
# Nothing of ours yet: what we depend on is installed with these, and anew only when pyproject.toml changes.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir service_kit shared_schemas task_app trainer_backend turnwise

FROM base AS task-app
# In each stage that reads it: the classic builder hands no argument of a stage on to the next.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir .
COPY service_kit service_kit
COPY shared_schemas shared_schemas
COPY task_app task_app
COPY trainer_backend trainer_backend
COPY turnwise turnwise
RUN pip install --no-cache-dir --no-deps --force-reinstall .
COPY docker/make-keys.sh /usr/local/bin/make-keys
USER turnwise
EXPOSE 8001
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/health')"]
CMD ["python", "-m", "task_app", "--host", "0.0.0.0", "--port", "8001"]

FROM base AS trainer
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir '.[trainer]'
COPY service_kit service_kit
COPY shared_schemas shared_schemas
COPY task_app task_app
COPY trainer_backend trainer_backend
COPY turnwise turnwise
RUN pip install --no-cache-dir --no-deps --force-reinstall .
COPY docker/trainer.sh /usr/local/bin/turnwise-trainer
COPY docker/demo.sh /usr/local/bin/post-demo
# Models of the hub are kept there, beside the runs: gigabytes, which a tmpfs would hold in memory.
ENV HF_HOME=/models
USER turnwise
EXPOSE 8100
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8100/health')"]
CMD ["sh", "/usr/local/bin/turnwise-trainer"]
