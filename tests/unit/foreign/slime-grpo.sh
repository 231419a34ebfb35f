#!/bin/bash
pkill -9 sglang
ray stop --force
set -ex
NVLINK=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
CKPT_ARGS=(
   --hf-checkpoint models/tiny
   #--hf-checkpoint models/other
   --ref-load models/tiny_torch_dist
   --load runs/slime
   --save runs/slime
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data data/train.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 2048
   --rollout-temperature 1

   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime data/aime.jsonl
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 4096
   --eval-top-p 1
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.01
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)
MISC_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --attention-dropout 0.0)
ray start --head --node-ip-address 127.0.0.1 --num-gpus 8 --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{}" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} \
   ${PERF_ARGS[@]} ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${MISC_ARGS[@]}
