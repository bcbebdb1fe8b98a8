"""The command line, one file a verb.

recipe  reads the user's file; what fails in it is shown with its lines and none of ours
train   samplewise train RECIPE
doctor  samplewise doctor RECIPE
costs   what it measures of a recipe
zoo     samplewise doctor --zoo
report  samplewise report RUN
main    puts them together: one line for a bad argument
"""
