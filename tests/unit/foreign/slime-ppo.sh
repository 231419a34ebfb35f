python3 train.py --hf-checkpoint models/tiny --prompt-data data/train.jsonl --num-epoch 2 --rollout-batch-size 8 \
   --n-samples-per-prompt 2 --advantage-estimator ppo --gamma 1.0 --lambd 0.95 --num-critic-only-steps 5 \
   --value-clip 0.2 --kl-coef 0.02 --rm-type remote_rm --rm-url http://127.0.0.1:9000/score --clip-grad 1.0 \
   --custom-generate-function-path my.generate --rollout-function-path my.rollout --loss-mask-type qwen \
   --train-backend fsdp --eval-interval 10 --skip-eval-before-train --eval-prompt-data aime data/a.jsonl m data/b.jsonl
