"""Recording of routing traces from the real gates of a model (needs the optional extra ``moesim[record]``).

Only this package and ``moesim.live.kernels`` import torch. Nothing else of moesim imports this package.
"""
