from jaxcomp.telemetry.alarms import Alarm as Alarm, Alarms as Alarms
from jaxcomp.telemetry.log import Log as Log
from jaxcomp.telemetry.records import record as record
from jaxcomp.telemetry.writers import Csv as Csv, TensorBoard as TensorBoard, read_csv as read_csv
