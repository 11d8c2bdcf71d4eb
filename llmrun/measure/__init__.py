"""Statistics of token events, measured ceilings, roofline, bench grid."""
