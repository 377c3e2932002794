"""Floor 3: GDN as Megatron modules, for plain megatron-core (`spec`) and for mcore-bridge (`bridge`)."""
