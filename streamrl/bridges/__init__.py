"""What lets users of other systems bring their code and settings along: a room for each system."""
