#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --time=24:00:00
# A learner of 16 ranks on two nodes, eight vLLM servers, a task app and the run (docs/cluster.md). Not run: adapt it.
# --node-rank is Slurm's number within the step, so the node of rank 0 is the first of the learner's.
set -euo pipefail
RUN=/shared/runs/mine VENV=/shared/turnwise/.venv VLLM=/shared/venv-vllm REPO=/shared/turnwise
export TURNWISE_LEARNER_KEY=$(openssl rand -hex 32) ENVIRONMENT_API_KEY=$(openssl rand -hex 32) HF_HOME=/shared/models
NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
HEAD=${NODES[0]} SAMPLER=${NODES[1]} LEARNER=${NODES[2]}
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }

# The learner: 16 ranks. When one ends all do, and the loop starts them again.
while :; do
  srun --overlap --nodes=2 --ntasks=2 --nodelist="${NODES[2]},${NODES[3]}" --kill-on-bad-exit=1 bash -c "
    exec $VENV/bin/torchrun --nnodes=2 --nproc-per-node=8 --node-rank=\$SLURM_NODEID --master-addr=$LEARNER --master-port=29500 \
      --max-restarts=0 -m trainer_backend.learner.process --host=\$(hostname) --port=9000" || sleep 5
done &

# Eight vLLM servers, one a GPU: the flags of docs/vllm.md.
URLS=""
for i in 0 1 2 3 4 5 6 7; do
  on "$SAMPLER" env CUDA_VISIBLE_DEVICES=$i PYTHONPATH=$REPO/trainer_backend/inference/vllm_worker VLLM_SERVER_DEV_MODE=1 \
    "$VLLM/bin/vllm" serve Qwen/Qwen3-4B --host 0.0.0.0 --port $((8000 + i)) --max-model-len 8192 --dtype bfloat16 \
    --served-model-name actor --enable-scale-out --logprobs-mode processed_logprobs --max-logprobs 21 \
    --generation-config vllm --enable-prompt-tokens-details --worker-extension-cls turnwise_vllm.TurnwiseWorker &
  URLS="$URLS\"http://$SAMPLER:$((8000 + i))\","
done

# A task app and the run.
TURNWISE_ALLOWED_INFERENCE_HOSTS=$HEAD on "$HEAD" "$VENV/bin/python" -m task_app --host 0.0.0.0 --port 8001 &
if [ -e "$RUN/run.json" ]; then WORDS="--resume $RUN"; else WORDS="mine.toml --run $RUN"; fi
on "$HEAD" "$VENV/bin/turnwise" train $WORDS --set "learner.url=\"http://$LEARNER:9000\"" --set learner.nnodes=2 --set learner.nproc_per_node=8 --set "inference.urls=[${URLS%,}]" \
  --set "services.task_url=[\"http://$HEAD:8001\"]" --set "services.gateway_host=\"$HEAD\""
scancel "$SLURM_JOB_ID"
