"""ZeRO as its paper describes it, which the other frameworks are checked against."""
