"""The update of this rank's shards: by kernels, or by an optimizer class of torch's kind."""
