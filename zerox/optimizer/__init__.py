"""The parts of one optimizer, each an object that takes the core: Note [Parts of an optimizer] in core.py.

core: what the parts have together, and how its ranks synchronize
planning, adoption: how parameters get buckets; owned: what to say of whole ones; moved: those that .to() or .data =
  took away
on_meta, materialize: how a model on the meta device gets memory and first values;
  pretrained: by transformers; adapters: by PEFT
groups, param_groups: the optimizer's own groups and state, and groups that users add or change
terms, first_look, look_around: what ranks compare when it is built, and in the first step()
hand_out: rank 0's parameters on all ranks
steps: step() once ranks have synchronized; profiled: torch's hooks and ranges around it
mean_gradient, one_gradient: calls about the mean gradient, and about one parameter's; clip_together: of several
  optimizers
muon_groups: the param groups of a model, by what model_parts finds in it
join: how a rank without batches follows the others, in threads of followers
memory_bytes: bytes that this rank holds; local_bytes: by formula, of parameters that no wrapper has; given: what an
  optimizer would make of what zerox.estimate is given
"""
