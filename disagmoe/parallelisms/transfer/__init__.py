"""The many-to-many transfer between an A-group and an F-group: plan, wire format, channels, hops."""
