"""One file per architecture: config to DecoderSpec, weight names, supported values."""
