python3 train_async.py --hf-checkpoint models/tiny --prompt-data data/train.jsonl --num-rollout 100 \
   --rollout-batch-size 16 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --rollout-max-response-len 512 \
   --custom-rm-path my_rewards.score --advantage-estimator gspo --eps-clip 0.0003 --eps-clip-high 0.0004 \
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std \
   --over-sampling-batch-size 32 --partial-rollout --use-fault-tolerance --calculate-per-token-loss \
   --update-weights-interval 2 --use-wandb --wandb-project p --wandb-group g --rollout-num-gpus 4 \
   --num-layers 28 --hidden-size 1024 --rotary-base 1000000 --swiglu --qk-layernorm
