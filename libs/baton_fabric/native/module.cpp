#include <nanobind/nanobind.h>
#include <rdma/fabric.h>

NB_MODULE(_native, m) {
    m.def("libfabric_version", [] { return fi_version(); });
}
