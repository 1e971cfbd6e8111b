"""An optional HTTP front: plain JSON in and out, in front of a Triton server. Needs the extra `front`."""
