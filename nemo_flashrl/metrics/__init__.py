"""The numbers of a step: what each means, how they are formed, watched and shown."""
