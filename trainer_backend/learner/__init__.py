"""The learner: holds the policy in torch, scores segments, updates weights and writes checkpoints."""
