"""DFlash in one process: pairs of devices, a thread each; a frozen GDN target feeds a block-diffusion drafter."""
