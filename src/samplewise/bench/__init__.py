"""`samplewise bench`: exactness, time, host waits and memory on one device, as a report that can be sent to others.

bench     the measurements, in their order
report    the report: schema, validation, environment, tables
networks  ResNet-18, ViT and GPT-2 with random weights, made with torch alone
measure   times, host waits and memory of training updates
"""
