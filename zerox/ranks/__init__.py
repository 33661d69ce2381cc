"""Who trains together, and what ranks compare.

process_group: the argument of that name; group: the ranks, and zerox's own group over them, from own_groups
roll_call: who refused, failed or never came, before there is a group; polled_store: a store whose
  waits leave it free for other threads
compared: lines that ranks compare; calls: what the user called, in errors and long waits
last_words: tells others the error that ended a script; ends: a script's end that others wait for, or read beyond
axes: a mesh over the ranks; model_axes: axes that parts of the model lie on; advice: what ranks on several machines
  are told
dtensors: what is asked of DTensors; ties: what two pipeline stages share
subgroups: param groups that fewer ranks have; neighbours: who may read whose memory; exchange: how ranks exchange
  gradients, as the option or the variable says
wrapped: modules inside zerox's DistributedDataParallel; holders: who holds which parameters
forks: what happens around a fork
"""
