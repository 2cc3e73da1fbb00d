//! Errors of calls, as HTTP answers.

use crate::api::{ErrorBody, ErrorDetail, ErrorKind};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure(pub(crate) ErrorDetail);

impl Failure {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = block::without_numbers(&message.into()).into_owned();
        Self(ErrorDetail { kind, message, field: None })
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::BadRequest, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Names the part of the request that is wrong.
    pub(crate) fn in_field(mut self, field: &str) -> Self {
        self.0.field = Some(field.to_owned());
        self
    }

    fn status(&self) -> StatusCode {
        match self.0.kind {
            ErrorKind::BadRequest => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::InUse | ErrorKind::Cancelled => StatusCode::CONFLICT,
            ErrorKind::Denied => StatusCode::FORBIDDEN,
            ErrorKind::Unsupported | ErrorKind::BadImage => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::Io | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<block::Error> for Failure {
    fn from(error: block::Error) -> Self {
        let kind = match error.kind() {
            block::ErrorKind::BadOption => ErrorKind::BadRequest,
            block::ErrorKind::NotFound => ErrorKind::NotFound,
            block::ErrorKind::BadImage => ErrorKind::BadImage,
            block::ErrorKind::Unsupported => ErrorKind::Unsupported,
            block::ErrorKind::Denied => ErrorKind::Denied,
            block::ErrorKind::Locked => ErrorKind::InUse,
            block::ErrorKind::Cancelled => ErrorKind::Cancelled,
            _ => ErrorKind::Io,
        };
        Self::new(kind, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = self.status();
        (status, Json(ErrorBody { error: self.0 })).into_response()
    }
}
