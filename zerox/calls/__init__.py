"""What may be called between backward and step(), and what happens whenever ranks synchronize.

phases: what happens before ranks synchronize and after, in which order; grad_phases: what happens to gradients there
grad_calls: clip, scale, mean_over and their like, once ranks have synchronized
grad_answers: what placeholders answer; shard_writer: does to shards what users did in place to placeholders
capture: whether step() becomes part of a CUDA graph
"""
