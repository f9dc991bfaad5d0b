"""What is on the wire: subjects, the Arrow sample schema, and MessagePack structs. Depends on nothing above `streamrl.errors`."""
