"""Names in a predictor's file: of the record with its nets, of the reader of its parameters, and of the nets in it."""

from dagexec.frontend import predictor as file

META_NET_DEF = file.META_NET_DEF
PREDICTOR_DBREADER = file.DB_READER
PREDICT_NET_TYPE = file.PREDICT_NET
PREDICT_INIT_NET_TYPE = file.PREDICT_INIT
GLOBAL_INIT_NET_TYPE = file.GLOBAL_INIT
PARAMETERS_BLOB_TYPE = file.PARAMETERS
INPUTS_BLOB_TYPE = file.INPUTS
OUTPUTS_BLOB_TYPE = file.OUTPUTS
