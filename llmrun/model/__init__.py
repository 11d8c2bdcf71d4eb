"""One Decoder driven by a frozen spec; architectures live in archs/."""
