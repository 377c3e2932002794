"""From a mixer's first call to frozen kernels: rehearsed, checked against float64, chosen, frozen."""
