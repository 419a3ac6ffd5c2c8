/* The functions of oneDNN 3.1 (dnnl.h, Apache-2.0) and of OpenMP that dagexec calls.
   `make cffi` writes declared.py. */

typedef void *h;
typedef int64_t dims_t[12];
typedef struct { int arg; void *memory; } exec_arg_t;
typedef struct { int major, minor, patch; const char *hash; unsigned cpu_runtime, gpu_runtime; } version_t;

const version_t *dnnl_version(void);
int dnnl_engine_create(h *, int kind, size_t index);
int dnnl_stream_create(h *, h engine, unsigned flags);
int dnnl_stream_destroy(h);
int dnnl_get_effective_cpu_isa(void);
int dnnl_set_primitive_cache_capacity(int);

int dnnl_memory_desc_create_with_strides(h *, int ndims, const dims_t, int dtype, const dims_t strides);
int dnnl_memory_desc_create_with_tag(h *, int ndims, const dims_t, int dtype, int tag);
int dnnl_memory_desc_create_submemory(h *, h parent, const dims_t dims, const dims_t offsets);
int dnnl_memory_desc_clone(h *, h);
int dnnl_memory_desc_destroy(h);
int dnnl_memory_desc_equal(h, h);
int dnnl_memory_desc_query(h, int what, void *result);
size_t dnnl_memory_desc_get_size(h);
int dnnl_memory_create(h *, h desc, h engine, void *handle);
int dnnl_memory_set_data_handle(h, void *handle);
int dnnl_memory_destroy(h);

int dnnl_primitive_attr_create(h *);
int dnnl_primitive_attr_destroy(h);
int dnnl_primitive_attr_set_scratchpad_mode(h, int mode);
int dnnl_primitive_attr_set_scales_mask(h, int arg, int mask);
int dnnl_primitive_attr_set_zero_points_mask(h, int arg, int mask);
int dnnl_primitive_attr_set_post_ops(h, h post_ops);
int dnnl_post_ops_create(h *);
int dnnl_post_ops_destroy(h);
int dnnl_post_ops_append_sum(h, float scale, int32_t zero_point, int dtype);
int dnnl_post_ops_append_eltwise(h, int alg, float alpha, float beta);
int dnnl_post_ops_append_binary(h, int alg, h src1_desc);

int dnnl_primitive_desc_next_impl(h);
int dnnl_primitive_desc_clone(h *, h);
int dnnl_primitive_desc_destroy(h);
int dnnl_primitive_desc_query(h, int what, int index, void *result);
h dnnl_primitive_desc_query_md(h, int what, int index);
int dnnl_primitive_create(h *, h pd);
int dnnl_primitive_execute(h primitive, h stream, int nargs, const exec_arg_t *args);
int dnnl_primitive_destroy(h);

int dnnl_reorder_primitive_desc_create(h *, h src, h src_engine, h dst, h dst_engine, h attr);
int dnnl_sum_primitive_desc_create(h *, h engine, h dst, int n, const float *scales, const h *srcs, h attr);
int dnnl_binary_primitive_desc_create(h *, h engine, int alg, h src0, h src1, h dst, h attr);
int dnnl_convolution_forward_primitive_desc_create(h *, h engine, int prop, int alg, h src, h weights, h bias, h dst,
    const dims_t strides, const dims_t dilates, const dims_t head, const dims_t tail, h attr);
int dnnl_convolution_backward_data_primitive_desc_create(h *, h engine, int alg, h diff_src, h weights, h diff_dst,
    const dims_t strides, const dims_t dilates, const dims_t head, const dims_t tail, h hint, h attr);
int dnnl_convolution_backward_weights_primitive_desc_create(h *, h engine, int alg, h src, h diff_weights, h diff_bias,
    h diff_dst, const dims_t strides, const dims_t dilates, const dims_t head, const dims_t tail, h hint, h attr);
int dnnl_deconvolution_forward_primitive_desc_create(h *, h engine, int prop, int alg, h src, h weights, h bias, h dst,
    const dims_t strides, const dims_t dilates, const dims_t head, const dims_t tail, h attr);
int dnnl_shuffle_forward_primitive_desc_create(h *, h engine, int prop, h src, h dst, int axis, int64_t group, h attr);
int dnnl_eltwise_forward_primitive_desc_create(h *, h engine, int prop, int alg, h src, h dst, float alpha, float beta,
    h attr);
int dnnl_softmax_backward_primitive_desc_create(h *, h engine, int alg, h diff_src, h diff_dst, h dst, int axis,
    h hint, h attr);
int dnnl_softmax_forward_primitive_desc_create(h *, h engine, int prop, int alg, h src, h dst, int axis, h attr);
int dnnl_pooling_forward_primitive_desc_create(h *, h engine, int prop, int alg, h src, h dst, const dims_t strides,
    const dims_t kernel, const dims_t dilation, const dims_t head, const dims_t tail, h attr);
int dnnl_pooling_backward_primitive_desc_create(h *, h engine, int alg, h diff_src, h diff_dst, const dims_t strides,
    const dims_t kernel, const dims_t dilation, const dims_t head, const dims_t tail, h hint, h attr);
int dnnl_lrn_forward_primitive_desc_create(h *, h engine, int prop, int alg, h src, h dst, int64_t size, float alpha,
    float beta, float k, h attr);
int dnnl_batch_normalization_forward_primitive_desc_create(h *, h engine, int prop, h src, h dst, float epsilon,
    unsigned flags, h attr);
int dnnl_lrn_backward_primitive_desc_create(h *, h engine, int alg, h diff_src, h diff_dst, h src, int64_t size,
    float alpha, float beta, float k, h hint, h attr);
int dnnl_batch_normalization_backward_primitive_desc_create(h *, h engine, int prop, h diff_src, h diff_dst, h src,
    float epsilon, unsigned flags, h hint, h attr);
int dnnl_layer_normalization_forward_primitive_desc_create(h *, h engine, int prop, h src, h dst, h stat,
    float epsilon, unsigned flags, h attr);
int dnnl_inner_product_forward_primitive_desc_create(h *, h engine, int prop, h src, h weights, h bias, h dst, h attr);
int dnnl_matmul_primitive_desc_create(h *, h engine, h src, h weights, h bias, h dst, h attr);
int dnnl_resampling_forward_primitive_desc_create(h *, h engine, int prop, int alg, const float *factors, h src, h dst,
    h attr);
int dnnl_reduction_primitive_desc_create(h *, h engine, int alg, h src, h dst, float p, float eps, h attr);
int dnnl_lstm_forward_primitive_desc_create(h *, h engine, int prop, int direction, h src_layer, h src_iter,
    h src_iter_c, h weights_layer, h weights_iter, h peephole, h projection, h bias, h dst_layer, h dst_iter,
    h dst_iter_c, unsigned flags, h attr);

void omp_set_num_threads(int);
int omp_get_max_threads(void);
