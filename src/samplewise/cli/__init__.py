"""Command line interface, one file per command.

recipe  loading of the user's file; errors in it are shown with the user's lines only
train   samplewise train RECIPE
doctor  samplewise doctor RECIPE
costs   time and memory measurements of `samplewise doctor RECIPE`
zoo     samplewise doctor --zoo
report  samplewise report RUN
demo    samplewise demo
main    the typer application; prints one line for a bad argument
"""
