"""Parameters between steps: the gather that makes them whole again, and those that no wrapper has.

params: the face of csrc/params
overlap_gather: hides the gather under the next forward; compiled_regions knows Dynamo for that
unwrapped_params: each rank's own parameters, which the wrapper of the others leaves out
"""
